"""A contract over the registry, so that a new top-up is tested by being there."""

import pytest
import torch
from conftest import make_model
from profiles import by_day
from trial_helpers import build_evaluator, state

from optimum_neuronal.common.torch_state import inference
from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.saliency import SALIENCIES
from optimum_neuronal.saliency.plan import row_counts
from optimum_neuronal.topup import TOPUPS


@pytest.mark.parametrize("name", TOPUPS.names())
def test_contract(name, ids):
    """No weight is changed, the target is hit, and the same is answered again."""
    model = make_model("mistral")
    before, plans = state(model), []
    with inference(model):
        decoder = find_decoder(model)
        topup, projections = TOPUPS.get(name)(), decoder.projections
        for sparsity in by_day([0.6, 0.0, 0.8, 0.97, 0.6], 0.0, 0.6, 0.97):
            plan = topup.allocate(build_evaluator(decoder, SALIENCIES.get("wanda")(), ids, 4), sparsity).plan
            assert set(plan.sparsity) == set(projections)
            pruned = sum(row_counts(plan.sparsity[name], p.shape).sum().item() for name, p in projections.items())
            assert pruned / sum(p.numel for p in projections.values()) == pytest.approx(sparsity, abs=2e-3)
            plans.append(plan)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    for projection, value in plans[0].sparsity.items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(plans[-1].sparsity[projection]))


@pytest.mark.parametrize(
    "name, fields, message",
    [
        ("atp", {"candidates": 1}, "candidates is 1: expected a whole number of at least 2"),
        ("search", {"widths": ()}, "widths is empty: expected at least one number"),
        ("evopress", {"survivors": (2, 1)}, "expected equal lengths"),
        ("evopress", {"step": 0.5}, "step is 0.5 and levels is 8: expected a product of at most 1"),
    ],
)
def test_bad_hyper_parameters(name, fields, message):
    with pytest.raises(ValueError, match=message):
        TOPUPS.make(name, "topup_args", fields)
