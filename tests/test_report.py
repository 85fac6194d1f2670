import json

import pytest

from optimum_neuronal.report import PruningReport


def report(**more):
    values = {
        "config": {"saliency": "wanda", "topup": "neuronal", "min_expert_tokens": 32},
        "method": "wanda + neuronal, authors, block step",
        "requested_sparsity": 0.7,
        "achieved_sparsity": 0.69998,
        "blocks": {"layers.0": 0.625, "layers.1": 0.775},
        "projections": {"layers.0.q_proj": {"sparsity": 0.625, "smallest_row": 0.5, "largest_row": 0.75}},
        "block_lambda": None,
        "row_lambda": None,
        "decisions": {},
        "calibration": {},
        "seconds": {"block step": 1.25, "pruning": 2.0},
        "block_forwards": 12,
        "starved_experts": [],
        "peak_memory": {"host": 1_500_000_000},
        "versions": {"torch": "2.9"},
    }
    return PruningReport(**values | more)


def test_what_is_saved_is_what_was_found(tmp_path):
    path = report(block_lambda=0.1).save(tmp_path)
    assert path == tmp_path / "neuronal_report.json" and list(tmp_path.iterdir()) == [path]
    text = path.read_text(encoding="utf-8")
    assert json.loads(text) == report(block_lambda=0.1).to_dict() and json.loads(text)["version"] == 1
    with pytest.raises(FileExistsError, match="neuronal_report.json"):
        report().save(tmp_path)
    assert path.read_text(encoding="utf-8") == text


CALIBRATION = {"num_samples": 8, "seq_length": 16, "source": "c4", "seed": 3}


@pytest.mark.parametrize(
    "more, line",
    [
        ({}, "sparsity  69.9980% (requested: 70.00%)"),
        ({}, "by block  62.50% to 77.50%"),
        ({}, "peak memory  host 1.50 GB"),
        ({"block_lambda": 0.125}, "lambda of the block step  0.125"),
        ({"decisions": {"note": "no row step: x"}}, "note  no row step: x"),
        ({"resumed": True}, "seconds, resumed  block step 1.2, pruning 2.0"),
        ({"calibration": CALIBRATION}, "calibration  8 x 16 tokens of c4, seed 3"),
        (
            {"calibration": CALIBRATION | {"sampling": "authors", "add_bos": True}},
            "calibration  8 x 16 tokens of c4, seed 3 (the authors' draw), each begins with BOS",
        ),
        ({"evaluation": {"c4": {"dense": 10, "pruned": 12.345}}}, "perplexity, c4  10.00 (dense), 12.35 (pruned)"),
        (
            {"divergence": {"pruned": 0.5, "by_score": 0.75}},
            "KL divergence, held-out calibration text  0.500 (pruned), 0.750 (by score)",
        ),
        (
            {"evaluation": {"c4": {"windows": 4, "window": 8, "bos": True, "dense": 10}}},
            "perplexity, c4, 4 x 8 tokens (BOS first)  10.00 (dense)",
        ),
    ],
)
def test_lines_of_the_report(more, line):
    assert " ".join(line.split()) in [" ".join(shown.split()) for shown in str(report(**more)).splitlines()]
