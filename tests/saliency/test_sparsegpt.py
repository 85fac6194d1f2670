"""SparseGPT against cases by hand, a plain loop over columns, and least squares."""

import pytest
import torch
from random_layers import hessian_of, inputs, weights

from optimum_neuronal.saliency.authors.sparsegpt import AuthorsSparseGPT
from optimum_neuronal.saliency.base import solve_dampened
from optimum_neuronal.saliency.plan import ColumnPattern
from optimum_neuronal.saliency.sparsegpt import SparseGPT, inverse_factor


def solve(method, weight, hessian, sparsity, pattern=None):
    """The sparse weight of one projection."""
    return method.solve({"p": weight}, hessian, {"p": sparsity}, pattern)["p"]


def test_two_weights_by_hand():
    """Inputs x2 = x1: whatever is pruned, the other weight takes over."""
    sparse = solve(SparseGPT(dampening=1e-6), torch.tensor([[1.0, 3.0]]), 100 * torch.ones(2, 2), 0.5)
    torch.testing.assert_close(sparse, torch.tensor([[0.0, 4.0]]), atol=1e-3, rtol=0)


def test_uncorrelated_inputs_are_plain_saliency():
    weight, scale = weights(4, 6), torch.tensor([1.0, 2.0, 0.5, 1.0, 3.0, 1.0])
    sparse = solve(SparseGPT(), weight, torch.diag(scale), 0.5)
    kept = sparse != 0
    torch.testing.assert_close(sparse[kept], weight[kept])
    score = weight.square() * (scale + 0.01 * scale.mean())
    assert score[kept].min() > score[~kept].max() and kept.sum() == 12


def test_the_last_weights_are_updated_to_the_optimum():
    """With all pruned columns before all kept ones, the updates solve the least-squares problem."""
    x, weight = inputs(6), weights(3, 6)
    weight[:, :2] *= 1e-4  # these fall
    sparse = solve(SparseGPT(dampening=1e-7), weight, x.T @ x, 2 / 6)
    assert (sparse[:, :2] == 0).all()
    best = torch.linalg.lstsq(x[:, 2:], x @ weight.T).solution.T
    torch.testing.assert_close(sparse[:, 2:], best, atol=1e-3, rtol=1e-3)


def test_lazy_updates_change_nothing_where_masks_are_given():
    """A pattern fixes the masks' blocks, so that the size of the lazy blocks must not matter but for rounding."""
    weight, hessian, pattern = weights(8, 24), hessian_of(24), ColumnPattern(2, 4)
    expected = solve(SparseGPT(block_size=4), weight, hessian, 0.5, pattern)
    for block_size in [1, 7, 128]:
        sparse = solve(SparseGPT(block_size=block_size), weight, hessian, 0.5, pattern)
        assert ((sparse.view(8, -1, 4) != 0).sum(dim=-1) == 2).all()
        torch.testing.assert_close(sparse, expected, atol=1e-4, rtol=1e-4)


def test_the_target_is_hit_within_one_weight():
    for shape in [(5, 7), (16, 300), (3, 129)]:
        weight, hessian = weights(*shape), hessian_of(shape[1])
        for sparsity in [0.0, 0.01, 0.6, 0.7, 0.99, 1.0]:
            sparse = solve(SparseGPT(), weight, hessian, sparsity)
            assert abs((sparse == 0).sum().item() - sparsity * weight.numel()) <= 1
            assert torch.isfinite(sparse).all()


def test_the_authors_prune_one_weight_more_per_block_of_columns():
    weight, hessian = weights(5, 24), hessian_of(24)
    for sparsity, pruned in [(0.0, 3), (0.5, 3 * 21), (0.7, 3 * 29)]:  # of blocks of 40 weights
        sparse = solve(AuthorsSparseGPT(block_size=8), weight, hessian, sparsity)
        assert (sparse == 0).sum() == pruned


def test_the_authors_activations_weigh_early_sequences_more():
    """The n-th counts for 1 / n, in the activations alone."""
    x = inputs(3)[:60].view(6, -1, 3)
    own, theirs = SparseGPT.statistic(), AuthorsSparseGPT.statistic()
    for statistic in (own, theirs):
        statistic.update(x[:4], 4)
        statistic.update(x[4:], 2)
    torch.testing.assert_close(theirs.value, own.value / torch.tensor([1, 2, 3, 4, 5, 6])[:, None])
    assert torch.equal(theirs.hessian, own.hessian)


def test_dead_inputs_lose_their_weights_first():
    x, weight = inputs(10), weights(4, 10)
    x[:, 3] = 0
    sparse = solve(SparseGPT(), weight, x.T @ x, 0.1)
    assert (sparse[:, 3] == 0).all() and (sparse == 0).sum() == 4
    torch.testing.assert_close(sparse[:, :3], weight[:, :3])


@pytest.mark.parametrize("pattern", [None, ColumnPattern(2, 4)])
def test_no_more_weights_of_dead_inputs_are_pruned_than_asked_for(pattern):
    x, weight = inputs(12), weights(4, 12)
    x[:, 2:9] = 0
    sparse = solve(SparseGPT(), weight, x.T @ x, 0.5 if pattern else 0.25, pattern)
    assert (sparse == 0).sum() == (24 if pattern else 12)
    kept = (sparse != 0) & (x == 0).all(dim=0)
    assert kept.any() and torch.equal(sparse[kept], weight[kept])
    authors = solve(AuthorsSparseGPT(), weight, x.T @ x, 0.25)
    assert (authors[:, 2:9] == 0).all()


def test_the_factor_is_exact_to_float32_where_inputs_are_nearly_the_same():
    """Else it depends on the order in which a processor sums, and masks and perplexities with it."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(512, 1, generator=generator) + 0.05 * torch.randn(512, 128, generator=generator)
    matrix = solve_dampened(x.T @ x, 0.01, "layer", torch.clone)
    exact = torch.linalg.cholesky(torch.linalg.inv(matrix.double()), upper=True)
    error = (inverse_factor(matrix).double() - exact).norm() / exact.norm()
    assert error < 1e-7


def test_a_product_that_is_rounded_down_loses_no_weight():
    assert 0.29 * 100 < 29
    weight = torch.randn(10, 10, generator=torch.Generator().manual_seed(0))
    assert int((solve(SparseGPT(), weight, torch.eye(10), 0.29) == 0).sum()) == 29
