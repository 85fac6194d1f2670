"""Contract tests run over the registry, so that a new top-up is tested by being there."""

import math

import pytest
import torch
from conftest import make_model
from profiles import by_day
from trial_helpers import build_trials, state

from optimum_neuronal.blocks.block_inputs import inference
from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.saliency import SALIENCIES
from optimum_neuronal.topup import TOPUPS


def plan_sparsity(decoder, plan) -> float:
    pruned = sum(plan.row_counts(name, p.shape).sum().item() for name, p in decoder.projections.items())
    return pruned / sum(math.prod(p.shape) for p in decoder.projections.values())


@pytest.mark.parametrize("name", TOPUPS.names())
def test_contract(name, ids):
    """No weight is changed, the target is hit, and the same is answered again."""
    model = make_model("mistral")
    before, plans = state(model), []
    with inference(model):
        decoder = find_decoder(model)
        topup = TOPUPS.get(name)()
        topup.check(decoder)
        for sparsity in by_day([0.6, 0.0, 0.8, 0.97, 0.6], 0.0, 0.6, 0.97):
            plan = topup.allocate(build_trials(decoder, SALIENCIES.get("wanda")(), ids, 4), sparsity).plan
            assert set(plan.sparsity) == set(decoder.projections)
            assert plan_sparsity(decoder, plan) == pytest.approx(sparsity, abs=2e-3)
            plans.append(plan)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    for projection, value in plans[0].sparsity.items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(plans[-1].sparsity[projection]))


@pytest.mark.parametrize(
    "name, fields, message",
    [
        ("atp", {"trials": 1}, "trials is 1: expected a whole number of at least 2"),
        ("besa", {"candidate_step": 0.3}, "candidate_step is 0.3: expected 1 divided by a whole number"),
        ("dsa", {"lambdas": ()}, "lambdas is empty: expected at least one number"),
        ("evopress", {"survivors": (2, 1)}, "expected equally many numbers"),
        ("evopress", {"step": 0.5}, "step \\* levels of at most 1"),
        ("neuronal", {"block_lambdas": (0.1, 0.1)}, "expected each number once"),
        ("search", {"objective": "kll"}, "Did you mean 'kl'"),
    ],
)
def test_bad_hyper_parameters(name, fields, message):
    with pytest.raises(ValueError, match=message):
        TOPUPS.get(name)(**fields)
