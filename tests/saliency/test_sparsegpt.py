"""SparseGPT against cases by hand, a plain loop over columns, and least squares."""

import pytest
import torch

from optimum_neuronal.saliency.sparsegpt import SparseGPT
from optimum_neuronal.sparsity.masks import ColumnPattern


def inputs(features: int, tokens: int = 200, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(features, features, generator=generator)
    return torch.randn(tokens, features, generator=generator) @ mixing


def weights(rows: int, features: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(rows, features, generator=torch.Generator().manual_seed(seed))


def error(weight: torch.Tensor, sparse: torch.Tensor, x: torch.Tensor) -> float:
    return (x @ (weight - sparse).T).square().sum().item()


def test_two_weights_by_hand():
    """Inputs x2 = x1: whatever is pruned, the other weight takes over."""
    hessian = torch.tensor([[1.0, 1.0], [1.0, 1.0]]) * 100
    sparse = SparseGPT(dampening=1e-6).prune(torch.tensor([[1.0, 3.0]]), hessian, 0.5)
    torch.testing.assert_close(sparse, torch.tensor([[0.0, 4.0]]), atol=1e-3, rtol=0)


def test_uncorrelated_inputs_are_plain_saliency():
    weight, scale = weights(4, 6), torch.tensor([1.0, 2.0, 0.5, 1.0, 3.0, 1.0])
    sparse = SparseGPT().prune(weight, torch.diag(scale), 0.5)
    kept = sparse != 0
    torch.testing.assert_close(sparse[kept], weight[kept])
    score = weight.square() * (scale + 0.01 * scale.mean())
    assert score[kept].min() > score[~kept].max() and kept.sum() == 12


def test_the_last_weights_are_updated_to_the_optimum():
    """With all pruned columns before all kept ones, the updates solve the least-squares problem."""
    x = inputs(6)
    weight = weights(3, 6)
    weight[:, :2] *= 1e-4  # these fall
    sparse = SparseGPT(dampening=1e-7).prune(weight, x.T @ x, 2 / 6)
    assert (sparse[:, :2] == 0).all()
    best = torch.linalg.lstsq(x[:, 2:], x @ weight.T).solution.T
    torch.testing.assert_close(sparse[:, 2:], best, atol=1e-3, rtol=1e-3)


def test_it_loses_less_than_its_mask_alone():
    for sparsity in [0.3, 0.5, 0.7]:
        x, weight = inputs(40), weights(16, 40)
        sparse = SparseGPT().prune(weight, x.T @ x, sparsity)
        assert error(weight, sparse, x) < 0.9 * error(weight, torch.where(sparse == 0, 0, weight), x)


def test_lazy_updates_change_nothing_where_masks_are_given():
    """A pattern fixes the masks' blocks, so that the size of the lazy blocks must not matter but for rounding."""
    for block_size in [1, 7, 128]:
        x, weight, pattern = inputs(24), weights(8, 24), ColumnPattern(2, 4)
        expected = SparseGPT(block_size=4).prune(weight, x.T @ x, 0.5, pattern)
        sparse = SparseGPT(block_size=block_size).prune(weight, x.T @ x, 0.5, pattern)
        assert ((sparse.view(8, -1, 4) != 0).sum(dim=-1) == 2).all()
        torch.testing.assert_close(sparse, expected, atol=1e-4, rtol=1e-4)


def test_the_target_is_hit_within_one_weight():
    for shape in [(5, 7), (16, 300), (3, 129)]:
        for sparsity in [0.0, 0.01, 0.6, 0.7, 0.99, 1.0]:
            weight, x = weights(*shape), inputs(shape[1], 400)
            sparse = SparseGPT().prune(weight, x.T @ x, sparsity)
            assert abs((sparse == 0).sum().item() - sparsity * weight.numel()) <= 1
            assert torch.isfinite(sparse).all()


def test_dead_inputs_lose_their_weights_first():
    x, weight = inputs(10), weights(4, 10)
    x[:, 3] = 0
    sparse = SparseGPT().prune(weight, x.T @ x, 0.1)
    assert (sparse[:, 3] == 0).all() and (sparse == 0).sum() == 4
    torch.testing.assert_close(sparse[:, :3], weight[:, :3])


def test_arguments_are_left_alone():
    x, weight = inputs(10), weights(4, 10)
    hessian = x.T @ x
    copies = weight.clone(), hessian.clone()
    SparseGPT().prune(weight, hessian, 0.5)
    assert torch.equal(weight, copies[0]) and torch.equal(hessian, copies[1])


@pytest.fixture
def said(monkeypatch):
    messages = []
    monkeypatch.setattr("optimum_neuronal.saliency.base.logger.warning", messages.append)
    return messages


def test_a_singular_hessian_raises_the_dampening_and_says_so(said):
    hessian = torch.eye(4)
    hessian[0, 0] = -0.05  # not positive definite, as rounding may leave it
    sparse = SparseGPT().prune(weights(3, 4), hessian, 0.5, name="fc1")
    assert torch.isfinite(sparse).all()
    assert said == ["The Hessian of fc1 is close to singular: dampening is raised from 0.01 to 0.1."]


def test_a_hopeless_hessian_is_an_error(said):
    hessian = torch.eye(4)
    hessian[0, 0] = -1e9
    with pytest.raises(ValueError, match="Hessian of fc1 cannot be inverted, even with dampening"):
        SparseGPT().prune(weights(3, 4), hessian, 0.5, name="fc1")
    with pytest.raises(ValueError, match="Hessian of fc1 is not finite"):
        SparseGPT().prune(weights(3, 4), torch.full((4, 4), torch.nan), 0.5, name="fc1")


def test_a_sparsity_by_row_is_refused():
    with pytest.raises(ValueError, match="q_proj was given a sparsity by row: SparseGPT updates all rows"):
        SparseGPT().prune(weights(3, 4), torch.eye(4), torch.full((3,), 0.5), name="q_proj")


def test_bad_hyper_parameters():
    for arguments, message in [
        ({"block_size": 0}, "block_size is 0"),
        ({"dampening": 0}, "dampening is 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            SparseGPT(**arguments)
    with pytest.raises(TypeError, match="is 'a'"):
        SparseGPT(dampening="a")
