"""ATP and EvoPress, which compare output errors of plans."""

import math

import pytest
import torch
from by_hand import FakeOutputs, FakeTrials, by_block, make_block
from conftest import make_model
from trial_helpers import make_evaluator

from optimum_neuronal.common.torch_state import inference
from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.topup.atp import ATP, beta_grid, progression
from optimum_neuronal.topup.evopress import EvoPress, mutants, units_of
from optimum_neuronal.trials.output_errors import OutputErrors


def test_levels_by_hand(llama):
    """Equal blocks at 0.6: a level is 1/16 of 0.4, that is 0.025."""
    decoder = find_decoder(llama)
    plan = EvoPress().plan(units_of(decoder, "block"), (-2, 0, 2), 0.6)
    assert by_block(decoder.blocks, plan) == pytest.approx([0.55, 0.6, 0.65])
    for sparsity in (0.3, 0.9):
        extreme = EvoPress(step=1 / 3, levels=3).plan(units_of(decoder, "block"), (-3, 0, 3), sparsity)
        assert min(extreme.sparsity.values()) >= 0 and max(extreme.sparsity.values()) <= 1


def test_levels_keep_the_mean_where_sizes_differ(llama):
    """The first block has only its MLP pruned, and its step is smaller in share, not in weights."""
    decoder = find_decoder(llama, ignore=[r"layers\.0\.self_attn"])
    for unit in ("block", "projection"):
        units, generator = units_of(decoder, unit), torch.Generator().manual_seed(0)
        found = mutants(generator, (0,) * len(units), 5, 8)
        assert len(set(found)) == 5 and (0,) * len(units) not in found
        for levels in found:
            plan = EvoPress(unit=unit).plan(units, levels, 0.7)
            pruned = sum(plan.sparsity[name] * p.numel for name, p in decoder.projections.items())
            assert pruned / sum(block.numel for block in decoder.blocks) == pytest.approx(0.7, abs=1e-12)
    units = units_of(decoder, "block")
    small, large, _ = (sum(math.prod(p.shape) for p in unit) for unit in units)
    plan = EvoPress(step=0.5, levels=2).plan(units, (-1, 1, 0), 0.5)  # a level is a quarter of the smallest block
    assert by_block(decoder.blocks, plan) == pytest.approx([0.25, 0.5 + 0.25 * small / large, 0.5])


def test_the_best_known_plan_is_found(llama):
    """The error is smallest where the first block has 0.525 and the last 0.675: three levels away."""
    wanted = [0.525, 0.6, 0.675]
    evaluator = FakeOutputs(find_decoder(llama), lambda found: sum(abs(a - b) for a, b in zip(found, wanted)))
    allocation = EvoPress().allocate(evaluator, 0.6)
    assert by_block(evaluator.decoder.blocks, allocation.plan) == pytest.approx(wanted)
    errors = allocation.decisions["evopress"]["errors"]
    assert errors[0] == pytest.approx(0.15) and errors[-1] == pytest.approx(0, abs=1e-12)
    assert errors == sorted(errors, reverse=True), "the parent only gives way to something better"


def test_selection_narrows_step_by_step(llama):
    evaluator = FakeOutputs(find_decoder(llama))
    topup = EvoPress(generations=2, offspring=6, survivors=(4, 2), sequences=(1, 3))
    allocation = topup.allocate(evaluator, 0.6)
    asked = [(1, None), *[(6, 1), (4, 3), (2, None)] * 2]
    assert evaluator.asked == [(plans, "kl", sequences) for plans, sequences in asked]
    assert set(allocation.plan.sparsity.values()) == {0.6}, "equal errors do not replace the parent"


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
    assert by_block(decoder.blocks, progression(decoder, 0.7, 0.05)) == pytest.approx([0.65, 0.7, 0.75])


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
