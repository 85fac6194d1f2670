from itertools import product
from types import SimpleNamespace

import pytest
import torch
from by_hand import make_block, make_projection

from optimum_neuronal.model.projections import Block
from optimum_neuronal.topup import get_dist
from optimum_neuronal.topup.distribution import (
    block_sizes,
    plan_of_blocks,
    pruned_blocks,
    shift_to_mean,
    wanda_metric,
)


FIRST = make_block([[1.0, 2.0]], [[3.0], [4.0], [5.0]], name="first")
LEFT_OUT = Block("left out", None, {})
LAST = make_block([[6.0]], name="last")


def test_sizes_are_of_all_weights_of_a_block_and_all_its_projections_get_its_sparsity():
    decoder = SimpleNamespace(blocks=[FIRST, LEFT_OUT, LAST])
    sizes = block_sizes(decoder)
    assert pruned_blocks(decoder) == [FIRST, LAST], "those with something to prune"
    assert sizes.tolist() == [2 + 3, 1] and sizes.dtype == torch.float64
    plan = plan_of_blocks(decoder, torch.tensor([0.25, 0.5]))
    assert plan.sparsity == {"first.0": 0.25, "first.1": 0.25, "last.0": 0.5}


def test_wandas_metric_is_of_magnitudes_in_float32():
    projection = make_projection([[1.0, -2.0], [-3.0, 0.5]])
    projection.owner.data = projection.owner.data.bfloat16()
    metric = wanda_metric(projection, {"p": torch.tensor([2.0, 4.0])})
    assert metric.tolist() == [[2, 8], [6, 2]] and metric.dtype == torch.float32


class TestGetDist:
    def test_equation_by_hand(self):
        assert get_dist(0.7, 0.1, torch.tensor([3.0, 2.0, 1.0])).tolist() == pytest.approx([0.6, 0.7, 0.8])
        low, high = 0.5 - 0.8 / 3, 0.5 + 0.4 / 3
        assert get_dist(0.5, 0.2, torch.tensor([0.0, 0.0, 3.0])).tolist() == pytest.approx([high, high, low])
        weighted = get_dist(0.6, 0.1, torch.tensor([1.0, 0.0]), torch.tensor([1.0, 3.0]))
        assert weighted.tolist() == pytest.approx([0.45, 0.65]), "the mean is weighted by size"

    def test_constant_values_and_lambda_zero_give_the_mean(self):
        assert get_dist(0.7, 0.2, torch.ones(4)).tolist() == [0.7] * 4
        assert get_dist(0.7, 0.0, torch.arange(4)).tolist() == [0.7] * 4
        assert get_dist(0.7, 0.2, torch.tensor([5.0])).tolist() == [0.7]

    def test_clipping_keeps_the_mean(self):
        values = torch.randn(50, generator=torch.Generator().manual_seed(0))
        for sparsity, lam in product([0.02, 0.1, 0.5, 0.9, 0.98], [0.05, 0.25, 1.0]):
            spread = get_dist(sparsity, lam, values)
            assert spread.mean().item() == pytest.approx(sparsity, abs=1e-9)
            assert spread.min() >= 0.01 and spread.max() <= 0.99
        for sparsity in (0.0, 0.995):
            assert get_dist(sparsity, 0.2, torch.arange(3)).tolist() == [sparsity] * 3, "beyond the clip as asked"


def test_shift_to_mean_by_hand():
    """The mean is 0.65. Or 0.9 + x and 0.99 (clipped): 0.25 (0.9 + x) + 0.7425 = 0.98, so x = 0.05."""
    weights = torch.tensor([1, 3])
    for values, mean, expected in (([0.5, 0.7], 0.6, [0.45, 0.65]), ([0.9, 0.99], 0.98, [0.95, 0.99])):
        shifted = shift_to_mean(torch.tensor(values, dtype=torch.float64), mean, weights)
        assert shifted.tolist() == pytest.approx(expected)
