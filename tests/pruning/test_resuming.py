"""An interrupted prune goes on behind its last finished block or step, and ends as if nothing had happened."""

import json
from itertools import product

import pytest
import torch
from conftest import make_model, memory_of
from profiles import NIGHT, by_day
from safetensors.torch import load_file
from trial_helpers import same_state

from optimum_neuronal import NeuronALConfig, NeuronALPruner
from optimum_neuronal.blocks import runner as engine
from optimum_neuronal.blocks.runner import BlockRunner
from optimum_neuronal.files.records import SUFFIX, VALUE, Records
from optimum_neuronal.model.find_blocks import find_decoder


REFERENCES = ("sparse-stream", "dense")
LAMBDAS = {"block_lambdas": [0.05, 0.1, 0.15], "row_lambdas": [0, 0.1, 0.2]}


def prune(family, ids, work_dir=None, model=None, **fields):
    memory = memory_of(fields)
    defaults = {"topup": "neuronal", "num_samples": 12, "num_alignment_samples": 4, "topup_args": LAMBDAS}
    pruner = NeuronALPruner(NeuronALConfig(**{"sparsity": 0.7, "saliency": "wanda", **defaults, **fields}))
    return pruner.prune(model or make_model(family), ids, work_dir, **memory), pruner.report


class Stop(Exception):
    pass


@pytest.mark.parametrize(
    "family, reference",
    by_day(product(["llama", "mixtral"], REFERENCES), ("llama", "sparse-stream"), ("mixtral", "dense")),
)
def test_every_moment(family, reference, ids, tmp_path, monkeypatch):
    """Stopped again and again, one step or block further each time, until it is through."""
    fields = {"topup_args": {**LAMBDAS, "reference": reference}}
    expected, undisturbed = prune(family, ids, **fields)
    replay, stops, result = engine.replay, 0, None
    monkeypatch.setattr(BlockRunner, "check_replay", lambda self, ids: None)
    while result is None:
        budget = [14]  # more than the longest step takes

        def stopping(*args, budget=budget, **kwargs):
            budget[0] -= 1
            if budget[0] == 0:
                raise Stop
            return replay(*args, **kwargs)

        monkeypatch.setattr(engine, "replay", stopping)
        try:
            result, report = prune(family, ids, tmp_path, **fields)
        except Stop:
            stops += 1
            assert stops < 200, "it goes on"
    assert stops > 1 and same_state(result, expected.state_dict())
    assert all(report.decisions[step] == undisturbed.decisions[step] for step in ("block", "row"))
    assert report.starved_experts == undisturbed.starved_experts


STAGES = {
    "search": {"saliency": "alps", "topup": "search", "topup_args": {"budget": 12}},
    "levels on disk": {"topup": "search", "saliency": "sparsegpt", "topup_args": {"budget": 8}, "max_hidden_bytes": 0},
    "fitted": {"saliency": "alps", "topup": "uniform", "num_samples": 16, "refit_epochs": 1},
    "besa": {"topup": "besa"},
}


@pytest.mark.parametrize("stage", by_day(STAGES, "fitted", "search"))
def test_stopped_at_every_record(stage, tmp_path, monkeypatch):
    """Before and after it is written, of every method that finds weights in steps of its own."""
    ids = torch.randint(0, 64, (16, 16), generator=torch.Generator().manual_seed(1))
    fields = {"topup_args": {}, **STAGES[stage]}
    ids, put, left, early = ids[: fields.get("num_samples", 12)], Records.put, [0], False

    def stopping(self, *args):
        left[0] -= 1
        if left[0] == 0 and early:
            raise Stop
        put(self, *args)
        if left[0] == 0:
            raise Stop

    expected = prune("llama", ids, **fields)[0].state_dict()
    monkeypatch.setattr(Records, "put", stopping)
    assert same_state(prune("llama", ids, tmp_path / "whole", **fields)[0], expected)
    records = -left[0]
    moments = [(number, early) for number in range(1, records + 1) for early in (True, False)]
    for number, early in moments if NIGHT else moments[2:3]:
        left[0] = number
        with pytest.raises(Stop):
            prune("llama", ids, tmp_path / f"{number}{early}", **fields)
        assert same_state(prune("llama", ids, tmp_path / f"{number}{early}", **fields)[0], expected), (number, early)
    assert records >= 3


@pytest.mark.parametrize("saliency", ["wanda", "sparsegpt"])
def test_records_hold_packed_bits_and_new_values_alone(saliency, ids, tmp_path):
    model, _ = prune("llama", ids, tmp_path, saliency=saliency, topup="uniform", topup_args={})
    tensors = load_file(tmp_path / f"block-00001{SUFFIX}")
    assert json.loads(bytes(tensors.pop(VALUE).tolist())) == {"starved": []}
    for projection in find_decoder(model).blocks[1].pruned:
        kept = projection.weight != 0
        assert len(tensors.pop(f"{projection.name}.mask")) == -(-kept.numel() // 8)
        if saliency == "sparsegpt":
            assert torch.equal(tensors.pop(f"{projection.name}.values"), projection.weight[kept])
    assert not tensors


@pytest.mark.parametrize(
    ("fields", "changed"),
    [
        ({"saliency": "magnitude"}, "saliency was 'wanda', is 'magnitude'"),
        ({"seed": 1}, "seed was 0, is 1"),
        ({"topup_args": {**LAMBDAS, "block_lambdas": [0.1]}}, "topup_args was .*block_lambdas"),
    ],
)
def test_another_config_raises(fields, changed, ids, tmp_path):
    prune("llama", ids, tmp_path)
    with pytest.raises(ValueError, match=f"started with different settings: {changed}"):
        prune("llama", ids, tmp_path, **fields)


def test_another_model_and_other_data_raise(ids, tmp_path):
    prune("llama", ids, tmp_path)
    with pytest.raises(ValueError, match="started with different settings: model was '[0-9a-f]+', is"):
        prune("llama", ids, tmp_path, model=make_model("llama", seed=1))
    with pytest.raises(ValueError, match="started with different settings: calibration data was"):
        prune("llama", ids.flip(0), tmp_path)
