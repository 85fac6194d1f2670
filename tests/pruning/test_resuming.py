"""An interrupted prune goes on behind its last finished block or step, and ends as if nothing had happened."""

from itertools import product

import pytest
import torch
from conftest import make_model, memory_of
from profiles import NIGHT, by_day
from trial_helpers import state

from optimum_neuronal import NeuronALConfig, NeuronALPruner
from optimum_neuronal.blocks import runner as engine
from optimum_neuronal.blocks.runner import BlockRunner
from optimum_neuronal.files.records import Records


REFERENCES = ("sparse-stream", "dense")
LAMBDAS = {"block_lambdas": [0.05, 0.1, 0.15], "row_lambdas": [0, 0.1, 0.2]}


def config(**fields):
    defaults = {"topup": "neuronal", "num_samples": 12, "num_alignment_samples": 4, "topup_args": LAMBDAS}
    return NeuronALConfig(**{"sparsity": 0.7, "saliency": "wanda", **defaults, **fields})


def prune(family, ids, work_dir=None, **fields):
    memory, pruner = memory_of(fields), NeuronALPruner(config(**fields))
    model = pruner.prune(make_model(family), ids, work_dir, **memory)
    return pruner, state(model)


def equal(first, second):
    return all(torch.equal(value, second[key]) for key, value in first.items())


class Stop(Exception):
    pass


@pytest.mark.parametrize(
    "family, reference",
    by_day(product(["llama", "mixtral"], REFERENCES), ("llama", "sparse-stream"), ("mixtral", "dense")),
)
def test_every_moment(family, reference, ids, tmp_path, monkeypatch):
    """Stopped again and again, one step or block further each time, until it is through."""
    undisturbed, expected = prune(family, ids, topup_args={**LAMBDAS, "reference": reference})
    original, runs = engine.replay, 0
    while True:
        budget = [14]  # more than the longest step takes

        def replay(*args, budget=budget, **kwargs):
            budget[0] -= 1
            if budget[0] == 0:
                raise Stop
            return original(*args, **kwargs)

        monkeypatch.setattr(engine, "replay", replay)
        monkeypatch.setattr(BlockRunner, "check_replay", lambda self, ids: None)
        runs += 1
        assert runs < 200, "it goes on"
        try:
            pruner, result = prune(family, ids, tmp_path, topup_args={**LAMBDAS, "reference": reference})
        except Stop:
            continue
        break
    assert runs > 2 and equal(expected, result)
    assert pruner.report.decisions["block"]["candidates"] == undisturbed.report.decisions["block"]["candidates"]
    assert pruner.report.decisions["row"]["candidates"] == undisturbed.report.decisions["row"]["candidates"]
    assert pruner.report.starved_experts == undisturbed.report.starved_experts


STAGES = {
    "search": {"saliency": "alps", "topup": "search", "topup_args": {"budget": 12}, "refit_epochs": 0},
    "levels on disk": {"topup": "search", "saliency": "sparsegpt", "topup_args": {"budget": 8}, "max_hidden_bytes": 0},
    "fitted": {"saliency": "alps", "topup": "uniform", "num_samples": 16, "refit_epochs": 1},
    "with the head": {"topup": "uniform", "embedding_bits": 8},
    "quantised": {
        "topup": "search",
        "sparsity": None,
        "saliency": "alps",
        "bits_per_weight": 6.0,
        "embedding_bits": 8,
    },
}


@pytest.mark.parametrize("stage", by_day(STAGES, "fitted", "quantised"))
def test_stopped_at_every_record(stage, tmp_path, monkeypatch):
    """Before and after it is written, of every method that finds weights in steps of its own."""
    ids = torch.randint(0, 64, (16, 16), generator=torch.Generator().manual_seed(1))
    fields = {"topup_args": {}, "sparsity": 0.7, **STAGES[stage]}
    ids, put, left = ids[: fields.get("num_samples", 12)], Records.put, [0]

    def stopping(self, *args):
        left[0] -= 1
        if left[0] == 0 and early:
            raise Stop
        put(self, *args)
        if left[0] == 0:
            raise Stop

    expected = prune("llama", ids, **fields)[1]
    monkeypatch.setattr(Records, "put", stopping)
    early = False
    assert equal(expected, prune("llama", ids, tmp_path / "whole", **fields)[1])
    records = -left[0]
    moments = [(number, early) for number in range(1, records + 1) for early in (True, False)]
    for number, early in moments if NIGHT else moments[2:3]:
        left[0] = number
        with pytest.raises(Stop):
            prune("llama", ids, tmp_path / f"{number}{early}", **fields)
        assert equal(expected, prune("llama", ids, tmp_path / f"{number}{early}", **fields)[1]), (number, early)
    assert records >= 3


def test_another_config_model_or_other_data_raises(ids, tmp_path):
    prune("llama", ids, tmp_path)
    for fields, changed in [
        ({"saliency": "magnitude"}, "saliency was 'wanda', is 'magnitude'"),
        ({"seed": 1}, "seed was 0, is 1"),
        ({"topup_args": {**LAMBDAS, "block_lambdas": [0.1]}}, "topup_args was .*block_lambdas"),
    ]:
        with pytest.raises(ValueError, match=f"started with different settings: {changed}"):
            prune("llama", ids, tmp_path, **fields)
    with pytest.raises(ValueError, match="model was '[0-9a-f]+', is"):
        NeuronALPruner(config()).prune(make_model("llama", seed=1), ids, tmp_path)
    for name in ("model.embed_tokens", "model.norm", "lm_head"):
        other = make_model("llama")
        with torch.no_grad():
            other.get_submodule(name).weight.mul_(2)
        with pytest.raises(ValueError, match="model was '[0-9a-f]+', is"):
            NeuronALPruner(config()).prune(other, ids, tmp_path)
    with pytest.raises(ValueError, match="calibration data was"):
        prune("llama", ids.flip(0), tmp_path)
