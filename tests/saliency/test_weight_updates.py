"""What holds for all saliencies that update weights."""

import pytest
import torch
from random_layers import hessian_of, solve, weights

from optimum_neuronal.saliency.alps import ALPS
from optimum_neuronal.saliency.plan import ColumnPattern
from optimum_neuronal.saliency.sparsegpt import SparseGPT


@pytest.fixture(params=[SparseGPT, ALPS])
def method(request):
    return request.param


def with_dead_inputs(rows: int, features: int, dead: slice):
    """A weight and the Hessian of inputs of which some are always zero."""
    weight, hessian = weights(rows, features), hessian_of(features)
    hessian[dead] = hessian[:, dead] = 0
    return weight, hessian


@pytest.mark.parametrize("shape", [(5, 7), (16, 300), (600, 128)])
@pytest.mark.parametrize("sparsity", [0.0, 0.01, 0.6, 0.7, 0.99, 1.0])
def test_the_target_is_hit_within_one_weight(method, shape, sparsity):
    saliency = ALPS(iterations=6) if method is ALPS else method()
    sparse = solve(saliency, weights(*shape), hessian_of(shape[1]), sparsity)
    assert abs((sparse == 0).sum().item() - sparsity * sparse.numel()) <= 1 and torch.isfinite(sparse).all()


@pytest.mark.parametrize("pattern", [ColumnPattern(2, 4), ColumnPattern(4, 8), ColumnPattern(1, 4)], ids=str)
def test_patterns_are_kept_in_every_group(method, pattern):
    sparse = solve(method(), weights(8, 48), hessian_of(48), pattern.sparsity, pattern)
    assert ((sparse.view(8, -1, pattern.group) != 0).sum(dim=-1) == pattern.kept).all()


def test_dead_inputs_lose_their_weights_first(method):
    weight, hessian = with_dead_inputs(6, 10, slice(3, 4))
    weight[:, 3] = 100
    sparse = solve(method(), weight, hessian, 0.1)
    assert (sparse[:, 3] == 0).all() and (sparse == 0).sum() == 6
    alive = [column for column in range(10) if column != 3]
    torch.testing.assert_close(sparse[:, alive], weight[:, alive], atol=1e-3, rtol=1e-3)
    nothing = solve(method(), weights(3, 8), torch.zeros(8, 8), 0.5)
    assert (nothing == 0).sum() == 12 and torch.isfinite(nothing).all()


@pytest.mark.parametrize("pattern", [None, ColumnPattern(2, 4)])
def test_no_more_weights_of_dead_inputs_are_pruned_than_asked_for(method, pattern):
    weight, hessian = with_dead_inputs(6, 12, slice(2, 9))
    sparse = solve(method(), weight, hessian, 0.5 if pattern else 0.25, pattern)
    assert (sparse == 0).sum() == (36 if pattern else 18)
    kept = (sparse != 0) & (hessian.diagonal() == 0)
    assert kept.any() and torch.equal(sparse[kept], weight[kept])
