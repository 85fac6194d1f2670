from dataclasses import replace

from conftest import memory_of
from trial_helpers import state, unchanged

from optimum_neuronal import NeuronALConfig
from optimum_neuronal.data.calibration import CalibrationSet
from optimum_neuronal.pruning import prune as finding
from optimum_neuronal.pruning.context import Clock, check
from optimum_neuronal.pruning.prune import find_changes


def find(model, ids, clock=None, **fields):
    memory = memory_of(fields)
    config = NeuronALConfig(
        0.5, **{"saliency": "wanda", "topup": "uniform", "num_samples": 12, "num_alignment_samples": 4, **fields}
    )
    calibration = CalibrationSet(ids, "token ids", "token ids")
    return find_changes(replace(check(model, config, **memory), calibration=calibration, clock=clock or Clock()))


def test_changes_are_found_and_none_is_made(llama, ids):
    before, clock = state(llama), Clock()
    outcome = find(llama, ids, clock)
    assert unchanged(llama, before) and list(clock.seconds) == ["allocation", "pruning"]
    assert set(outcome.allocation.plan.sparsity.values()) == {0.5} and outcome.starved_experts == []
    assert outcome.changes.keys() == outcome.allocation.plan.sparsity.keys()
    for name, change in outcome.changes.items():
        assert (change.applied(llama.get_parameter(f"{name}.weight")) == 0).float().mean() == 0.5
    assert outcome.block_forwards == 3 + 12 * 5, "the check; what blocks receive, and what all but the last put out"


def test_fewer_tokens_than_inputs_give_a_warning(llama, ids, monkeypatch):
    said = []
    monkeypatch.setattr(finding.logger, "warning", said.append)
    find(llama, ids[:1, :8], saliency="alps", num_samples=1, num_alignment_samples=1)
    assert len(said) == 1 and "only 8 calibration tokens for projections of up to 48 inputs" in said[0]
    find(llama, ids, saliency="alps")
    find(llama, ids[:1, :8], num_samples=1, num_alignment_samples=1)
    assert len(said) == 1, "enough; and a saliency that fits nothing"


def test_a_log_names_and_counts_the_steps(llama, ids, capsys):
    neuronal = ["comparing sparsities by block", "measuring how rows deviate", "comparing sparsities by row"]
    final = "changing the weights, block by block"
    for topup, expected in (
        ("uniform", [f"step 1 of 1: {final}"]),
        ("neuronal:steps=both", [*(f"step 1 of 2: {label}" for label in neuronal), f"step 2 of 2: {final}"]),
    ):
        find(llama, ids, saliency="wanda", topup=topup)
        assert capsys.readouterr().err.splitlines() == expected
