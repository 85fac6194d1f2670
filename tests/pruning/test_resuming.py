"""An interrupted run goes on behind its last finished block or step, and ends as if nothing had happened."""

import pytest
import torch
from conftest import make_model, memory_of
from profiles import NIGHT, by_day
from trial_helpers import same_state

from optimum_neuronal import NeuronALConfig, NeuronALPruner
from optimum_neuronal.files.records import Records


LAMBDAS = {"block_lambdas": [0.05, 0.1, 0.15], "row_lambdas": [0, 0.1, 0.2]}


def prune(ids, work_dir=None, model=None, family="llama", **fields):
    memory = memory_of(fields)
    defaults = {"saliency": "wanda", "num_samples": 12, "num_alignment_samples": 4, "topup_args": LAMBDAS}
    pruner = NeuronALPruner(NeuronALConfig(0.7, **{**defaults, **fields}))
    return pruner.prune(model or make_model(family), ids, work_dir, **memory), pruner.report


class Stop(Exception):
    pass


STAGES = {
    "neuronal": {},
    "neuronal, dense": {"family": "mixtral", "topup_args": {**LAMBDAS, "reference": "dense"}, "min_expert_tokens": 40},
    "search": {"saliency": "alps", "topup": "search", "topup_args": {"budget": 12}},
    "levels on disk": {"topup": "search", "saliency": "sparsegpt", "topup_args": {"budget": 8}, "max_hidden_bytes": 0},
    "fitted": {"saliency": "alps", "topup": "uniform", "topup_args": {}, "num_samples": 16, "refit_epochs": 1},
}


@pytest.mark.parametrize("stage", by_day(STAGES, "neuronal, dense", "fitted", "search"))
def test_stopped_at_every_record(stage, tmp_path, monkeypatch):
    """Before and after it is written, of every method that finds weights in steps of its own."""
    fields, left, early, put = STAGES[stage], [0], False, Records.put
    ids = torch.randint(0, 64, (fields.get("num_samples", 12), 16), generator=torch.Generator().manual_seed(1))

    def stopping(self, *args):
        left[0] -= 1
        if left[0] == 0 and early:
            raise Stop
        put(self, *args)
        if left[0] == 0:
            raise Stop

    expected, undisturbed = prune(ids, **fields)
    monkeypatch.setattr(Records, "put", stopping)
    prune(ids, tmp_path / "whole", **fields)
    records = -left[0]
    assert records >= 3
    moments = [(number, early) for number in range(1, records + 1) for early in (True, False)]
    for number, early in moments if NIGHT else (moments[2], moments[-1]):
        left[0], work_dir = number, tmp_path / f"{number}{early}"
        with pytest.raises(Stop):
            prune(ids, work_dir, **fields)
        model, report = prune(ids, work_dir, **fields)
        assert same_state(model, expected.state_dict()), (number, early)
        assert report.decisions == undisturbed.decisions and report.starved_experts == undisturbed.starved_experts
        assert report.resumed == ((number, early) != (1, True)) and not undisturbed.resumed


def test_another_config_another_model_and_other_data_raise(ids, tmp_path):
    prune(ids, tmp_path)
    for changed, again in (
        ("saliency was 'wanda', is 'magnitude'", lambda: prune(ids, tmp_path, saliency="magnitude")),
        ("topup_args was .*block_lambdas", lambda: prune(ids, tmp_path, topup_args={"block_lambdas": [0.1]})),
        ("model was '[0-9a-f]+', is", lambda: prune(ids, tmp_path, model=make_model("llama", seed=1))),
        ("calibration data was", lambda: prune(ids.flip(0), tmp_path)),
    ):
        with pytest.raises(ValueError, match=f"started with different settings: {changed}"):
            again()
