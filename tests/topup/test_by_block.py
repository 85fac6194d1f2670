from types import SimpleNamespace

import torch
from by_hand import FakeSweep, make_block, make_projection

from optimum_neuronal.model.projections import Block
from optimum_neuronal.topup.by_block import (
    block_scores,
    block_sizes,
    plan_of_blocks,
    pruned_blocks,
    wanda_metric,
)


FIRST = make_block([[1.0, 2.0]], [[3.0], [4.0], [5.0]], name="first")
LEFT_OUT = Block("left out", None, {})
LAST = make_block([[6.0]], name="last")


def test_blocks_without_anything_to_prune_take_no_part():
    assert pruned_blocks(SimpleNamespace(blocks=[FIRST, LEFT_OUT, LAST])) == [FIRST, LAST]


def test_sizes_are_of_all_weights_of_a_block():
    sizes = block_sizes([FIRST, LAST])
    assert sizes.tolist() == [2 + 3, 1] and sizes.dtype == torch.float64


def test_all_projections_of_a_block_get_its_sparsity():
    plan = plan_of_blocks([FIRST, LAST], torch.tensor([0.25, 0.5]))
    assert plan.sparsity == {"first.0": 0.25, "first.1": 0.25, "last.0": 0.5}


def test_blocks_that_are_left_out_have_no_score():
    sweep = FakeSweep([FIRST, LEFT_OUT, LAST], activations={"first.0": 10, "first.1": 20, "last.0": 30})
    scores = block_scores(sweep, lambda block, activations: activations[block.pruned_names[-1]], "Scores")
    assert scores.tolist() == [20, 30] and scores.dtype == torch.float64 and sweep.asked == ["Scores"]


def test_wandas_metric_is_of_magnitudes_in_float32():
    projection = make_projection([[1.0, -2.0], [-3.0, 0.5]])
    projection.owner.data = projection.owner.data.bfloat16()
    metric = wanda_metric(projection, {"p": torch.tensor([2.0, 4.0])})
    assert metric.tolist() == [[2, 8], [6, 2]] and metric.dtype == torch.float32
