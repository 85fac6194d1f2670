"""SparseGPT against cases by hand, a plain loop over columns, and least squares."""

import pytest
import torch
from random_layers import hessian_of, inputs, solve, weights

from optimum_neuronal.saliency import sparsegpt
from optimum_neuronal.saliency.base import solve_dampened
from optimum_neuronal.saliency.plan import ColumnPattern
from optimum_neuronal.saliency.sparsegpt import AuthorsSparseGPT, SparseGPT, inverse_factor, prune_block


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
    """A pattern fixes the masks' blocks, so the size of the lazy blocks matters only for rounding."""
    weight, hessian, pattern = weights(8, 24), hessian_of(24), ColumnPattern(2, 4)
    first, *others = (solve(SparseGPT(block_size=size), weight, hessian, 0.5, pattern) for size in (4, 1, 7, 128))
    for sparse in others:
        torch.testing.assert_close(sparse, first, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("pattern", [None, ColumnPattern(2, 4)])
@pytest.mark.parametrize("size", [128, 12])
def test_projections_with_the_same_input_are_as_if_alone(pattern, size):
    """Bit for bit, with their own sparsities and some inputs that are always zero."""
    together = {"q": weights(64, 300, 1), "k": weights(16, 300, 2), "v": weights(7, 300, 3)}
    hessian, sparsities = hessian_of(300), {"q": 0.5, "k": 0.85, "v": 0.0}
    hessian[5:9] = hessian[:, 5:9] = 0
    saliency = SparseGPT(block_size=size)
    for name, found in saliency.solve(together, hessian, sparsities, pattern).items():
        assert torch.equal(found, solve(saliency, together[name], hessian, sparsities[name], pattern)), name


def test_products_are_exact_whatever_the_user_set(monkeypatch):
    seen, before = [], torch.get_float32_matmul_precision()
    now = torch.get_float32_matmul_precision
    monkeypatch.setattr(sparsegpt, "prune_block", lambda *given: seen.append(now()) or prune_block(*given))
    torch.set_float32_matmul_precision("high")
    solve(SparseGPT(block_size=4), weights(4, 12), hessian_of(12), 0.5)
    torch.set_float32_matmul_precision(before)
    assert set(seen) == {"highest"}


def test_the_columns_of_a_block_against_a_plain_loop():
    weight, factor = weights(30, 20), inverse_factor(hessian_of(20))
    mask, scale, errors, expected = weights(30, 20, 2) > 0, factor.diagonal().clone(), [], weight.clone()
    scale[4] = torch.inf
    for index in range(20):
        kept = torch.where(mask[:, index], expected[:, index], 0)
        errors.append((expected[:, index] - kept) / scale[index])
        expected[:, index + 1 :] -= torch.outer(errors[-1], factor[index, index + 1 :])
        expected[:, index] = kept
    assert torch.equal(prune_block(weight, factor, scale, mask), torch.stack(errors, dim=1))
    assert torch.equal(weight, expected)


def test_the_authors_prune_one_weight_more_per_block_of_columns():
    weight, hessian = weights(5, 24), hessian_of(24)
    for sparsity, pruned in [(0.0, 3), (0.5, 3 * 21), (0.7, 3 * 29)]:  # of blocks of 40 weights
        assert (solve(AuthorsSparseGPT(block_size=8), weight, hessian, sparsity) == 0).sum() == pruned


def test_the_authors_prune_all_weights_of_dead_inputs():
    weight, hessian = weights(4, 12), hessian_of(12)
    hessian[2:9] = hessian[:, 2:9] = 0
    assert (solve(AuthorsSparseGPT(), weight, hessian, 0.25)[:, 2:9] == 0).all()


def test_the_authors_count_dead_inputs_as_one_in_dampening():
    """Two inputs of four are alive, with a mean of squares of 0.02: the mean diagonal is 0.51, and not 0.01."""
    weight, alive = torch.tensor([[1.0, 1.0, 2.0, 9.0]]), torch.tensor([True, False, True, False])
    hessian = torch.diag(0.02 * alive)
    hessian[0, 2] = hessian[2, 0] = 0.01
    sparse = solve(AuthorsSparseGPT(), weight, hessian, 0.5)
    torch.testing.assert_close(sparse, torch.tensor([[0.0, 0.0, 2 + 0.01 / (0.02 + 0.01 * 0.51), 0.0]]))


def test_the_authors_activations_weigh_early_sequences_more():
    """The n-th counts for 1 / n, in the activations alone. Hessians are means over the sequences, times two."""
    x = inputs(3)[:60].view(6, -1, 3)
    own, theirs = SparseGPT.statistic(), AuthorsSparseGPT.statistic()
    for statistic in (own, theirs):
        statistic.update(x[:4], 4)
        statistic.update(x[4:], 2)
    torch.testing.assert_close(theirs.value, own.value / torch.tensor([1, 2, 3, 4, 5, 6])[:, None])
    torch.testing.assert_close(theirs.hessian, 2 * own.hessian / 6)


def test_the_factor_is_exact_to_float32_where_inputs_are_nearly_the_same():
    """Otherwise it depends on the order in which a processor sums, and masks and perplexities with it."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(512, 1, generator=generator) + 0.05 * torch.randn(512, 128, generator=generator)
    matrix = solve_dampened(x.T @ x, 0.01, "layer", torch.clone)
    exact = torch.linalg.cholesky(torch.linalg.inv(matrix.double()), upper=True)
    error = (inverse_factor(matrix).double() - exact).norm() / exact.norm()
    assert error < 1e-7


def test_the_authors_factorize_in_float32_and_in_float64_where_that_fails():
    matrix = solve_dampened(hessian_of(300), 0.01, "layer", torch.clone)
    theirs = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(matrix)), upper=True)
    near_singular = torch.diag(torch.tensor([1.0, 1e-40]))  # its inverse is infinite in float32
    for given, expected in ((matrix, theirs), (near_singular, inverse_factor(near_singular))):
        assert torch.equal(AuthorsSparseGPT()._factor(given), expected)
