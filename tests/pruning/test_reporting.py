"""The report, and the sparsity that it counts."""

from itertools import product
from types import SimpleNamespace

import pytest
import torch
from by_hand import make_block

from optimum_neuronal import NeuronALConfig
from optimum_neuronal.common.display import display_name
from optimum_neuronal.data.token_windows import TokenWindows
from optimum_neuronal.files.records import Records
from optimum_neuronal.model.change import packed_bytes
from optimum_neuronal.packed.packed_weight import PackedWeight
from optimum_neuronal.pruning.prepare import Clock
from optimum_neuronal.pruning.prune import PruneOutcome, make_report
from optimum_neuronal.saliency.plan import Plan
from optimum_neuronal.topup import Allocation


def report_of(decisions, calibration=None, dataset="c4"):
    block, model, clock = make_block([[0.0, 1.0, 2.0, 3.0]]), SimpleNamespace(dtype=torch.bfloat16), Clock()
    clock.lap("pruning")
    context = SimpleNamespace(
        decoder=SimpleNamespace(blocks=[block], projections=block.projections, model=model),
        evaluator=SimpleNamespace(records=Records()),
        model=model,
        config=(config := NeuronALConfig(0.5, topup="neuronal", dataset=dataset, saliency="wanda")),
        methods=config.methods,
        calibration=calibration,
        clock=clock,
        dataset=None,
        refit_dtype=None,
    )
    allocation = Allocation(Plan({"block.0": 0.5}), decisions)
    return make_report(context, PruneOutcome(allocation, {}, 12, ["experts.0.up"], {"pruned": 0.5}))


def test_what_was_requested_and_what_was_found():
    decisions = {"block": {"lambda": 0.125}, "row": {"lambda": 0.0}}
    report = report_of(decisions)
    assert (report.requested_sparsity, report.achieved_sparsity, report.blocks) == (0.5, 0.25, {"block": 0.25})
    assert (report.block_lambda, report.row_lambda, report.decisions) == (0.125, 0.0, decisions)
    assert (report.block_forwards, report.starved_experts) == (12, ["experts.0.up"])
    assert report.divergence == {"pruned": 0.5}
    assert list(report.seconds) == ["pruning"] and report.config["topup"] == "neuronal" and report.calibration == {}
    assert report.dtype == "bfloat16" and report.method == "wanda + neuronal, sequence, block step"
    assert report.bits_per_weight == 8 * 4, "a word of mask and three values of four bytes would be larger than dense"


def test_what_is_published_names_no_folder(tmp_path):
    own = tmp_path / "own.jsonl"
    own.write_text("{}")
    report = report_of({}, TokenWindows(torch.zeros(3, 16, dtype=torch.int64), "own.jsonl", "documents"), str(own))
    assert report.config["dataset"] == "own.jsonl" and report.calibration["num_samples"] == 3
    assert report_of({}, dataset=["c4", str(own)]).config["dataset"] == ["c4", "own.jsonl"]
    assert str(tmp_path) not in str(report.to_dict())
    for folder, column in product([tmp_path, "/no/such/folder"], ["", ":text"]):
        assert display_name(f"{folder}/own.jsonl{column}") == f"own.jsonl{column}"
    for dataset in ["wikitext2", "allenai/c4:train:text", "no/such/file.txt", "a text " * 1000]:
        assert display_name(dataset) == dataset


@pytest.mark.parametrize("shape", [(3, 5), (64, 128), (7, 65), (4, 3, 100)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_packed_bytes_are_those_of_a_packed_weight(shape, dtype):
    weight = torch.rand(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    weight = torch.where(weight > 0.6, weight, 0).to(dtype)
    stored = PackedWeight.pack(weight).stored().values()
    kept = int((weight != 0).sum())
    assert packed_bytes(shape, kept, dtype.itemsize) == sum(tensor.nbytes for tensor in stored)
