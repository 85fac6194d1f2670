import math

import pytest
import torch
from by_hand import FakeTrials, by_block, make_block
from conftest import make_model
from trial_helpers import make_evaluator

from optimum_neuronal.common.torch_state import inference
from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.topup.atp import ATP, beta_grid, progression
from optimum_neuronal.trials.output_errors import OutputErrors


def test_grid_ends_where_a_block_would_leave_the_range():
    """At 70 % the last of 4 blocks may rise by 0.29: beta is 0.58 / 3 at most; at 20 % the first may fall by 0.19."""
    assert beta_grid(4, 0.7, 3) == pytest.approx([0.0, 0.29 / 3, 0.58 / 3])
    assert beta_grid(4, 0.2, 2) == pytest.approx([0.0, 0.38 / 3])
    assert len(beta_grid(32, 0.7, 15)) == 15
    for blocks, sparsity in [(1, 0.7), (4, 0.0), (4, 0.995)]:
        assert beta_grid(blocks, sparsity, 15) == [0.0], "nothing can be spread"


def test_progression_by_hand(llama):
    """S - beta (L - 1) / 2 + beta l, with S = 0.7, beta = 0.05 and L = 3."""
    decoder = find_decoder(llama)
    plan = progression(decoder, 0.7, 0.05)
    assert by_block(decoder.blocks, plan) == pytest.approx([0.65, 0.7, 0.75])
    assert set(plan.sparsity) == set(decoder.projections)


def test_lowest_error_wins_and_the_first_of_equals():
    blocks = [make_block(torch.ones(2, 2), name=f"b{index}") for index in range(3)]
    evaluator = FakeTrials(blocks, errors=[3.0, 2.0, 2.0, 4.0])
    allocation = ATP(candidates=4).allocate(evaluator, 0.7)
    ((measurement, plans),) = evaluator.asked
    assert measurement == OutputErrors("nll") and len(plans) == 4 and allocation.plan is plans[1]
    decision = allocation.decisions["atp"]
    assert decision["beta"] == pytest.approx(0.29 / 3) == decision["candidates"][1]["beta"]
    assert [candidate["error"] for candidate in decision["candidates"]] == [3.0, 2.0, 2.0, 4.0]


@pytest.mark.parametrize("layers, candidates", [(1, 0), (2, 3)])
def test_a_single_block_leaves_no_choice(layers, candidates, ids):
    model = make_model("llama", num_hidden_layers=layers)
    with inference(model):
        found = ATP(candidates=3).allocate(make_evaluator(model, ids), 0.7).decisions["atp"]["candidates"]
    assert len(found) == candidates and all(math.isfinite(candidate["error"]) for candidate in found)
