import pytest
import torch

from optimum_neuronal.saliency import SALIENCIES
from optimum_neuronal.saliency import base as module
from optimum_neuronal.saliency.base import RAISES, DampenedHessian, dense_target
from optimum_neuronal.sparsity.masks import ColumnPattern


@pytest.mark.parametrize("name", SALIENCIES.names())
def test_contract(name):
    saliency = SALIENCIES.get(name)()
    weight = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    activation = torch.rand(7, generator=torch.Generator().manual_seed(1)) if saliency.uses_activations else None
    copy = weight.clone()
    score = saliency.score(weight, activation)
    assert score.shape == weight.shape and score.dtype == torch.float32
    assert torch.isfinite(score).all() and (score >= 0).all()
    assert torch.equal(weight, copy) and torch.equal(score, saliency.score(weight, activation))
    assert torch.equal(saliency.score(-weight, activation), score), "the sign of a weight does not matter"


UPDATING = [name for name in SALIENCIES.names() if SALIENCIES.get(name).updates_weights]
BY_ROW = [name for name in UPDATING if SALIENCIES.get(name).knows_rows]


def test_what_cannot_be_asked_is_refused_before_the_work():
    for name in UPDATING:
        for sparsity, pattern, message in [
            (-0.1, None, r"fc1 was given the sparsity -0.1 to -0.1: expected one in \[0, 1\]"),
            (1.5, None, "fc1 was given the sparsity 1.5"),
            (float("nan"), None, "fc1 was given the sparsity nan"),
            (0.4, ColumnPattern(3, 5), "fc1 has 8 input features, not a multiple of 5 as 3:5 needs"),
        ]:
            with pytest.raises(ValueError, match=message):
                SALIENCIES.get(name)().prune(torch.ones(3, 8), torch.eye(8), sparsity, pattern, "fc1")


def test_rows_that_cannot_be_asked_are_refused_before_the_work():
    """More weights than a row has, fewer than none, and rows that a pattern contradicts."""
    for name in BY_ROW:
        for rows, pattern, message in [
            ([0.5, 1.25, 0.5], None, "fc1 was given the sparsity 0.5 to 1.25"),
            ([0.5, -0.25, 0.5], None, "fc1 was given the sparsity -0.25 to 0.5"),
            ([0.5, 0.5], None, r"sparsity of shape \[2\]: expected a number, or one for each of its 3 rows"),
            (
                [0.25, 0.75, 0.5],
                ColumnPattern(2, 4),
                "rows of unequal sparsity, but the pattern 2:4 prunes every row alike",
            ),
        ]:
            rows = torch.tensor(rows, dtype=torch.float64)
            with pytest.raises(ValueError, match=message):
                SALIENCIES.get(name)().prune(torch.ones(3, 8), torch.eye(8), rows, pattern, "fc1")


@pytest.mark.parametrize("name", BY_ROW)
def test_rows_of_one_sparsity_go_together_with_a_pattern(name):
    rows = torch.full((3,), 0.5, dtype=torch.float64)
    found = SALIENCIES.get(name)().prune(torch.randn(3, 8), torch.eye(8), rows, ColumnPattern(2, 4))
    assert ((found.view(3, 2, 4) != 0).sum(dim=-1) == 2).all()


def inputs(tokens: int, features: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(features, features, generator=generator)
    return torch.randn(tokens, features, generator=generator) @ mixing


def weights(rows: int, features: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(rows, features, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def said(monkeypatch):
    messages = []
    monkeypatch.setattr(module.logger, "warning", messages.append)
    return messages


class TestDampenedHessian:
    def test_a_share_of_the_mean_diagonal_is_added(self):
        hessian = torch.tensor([[2.0, 1.0], [1.0, 4.0]])
        dampened = DampenedHessian(hessian, 0.1, "fc1")
        torch.testing.assert_close(dampened.matrix, torch.tensor([[2.3, 1.0], [1.0, 4.3]]))
        assert hessian.tolist() == [[2.0, 1.0], [1.0, 4.0]], "not changed"

    def test_dead_inputs_count_as_one(self):
        hessian = torch.diag(torch.tensor([2.0, 0.0, 4.0]))
        dampened = DampenedHessian(hessian, 0.5, "fc1")
        assert dampened.dead.tolist() == [False, True, False]
        assert dampened.matrix.diagonal().tolist() == [3.0, 2.0, 5.0]
        nothing = DampenedHessian(torch.zeros(2, 2), 0.5, "fc1")
        assert nothing.dead.all() and nothing.matrix.diagonal().tolist() == [1.5, 1.5]

    def test_raising_it_multiplies_what_is_added_by_ten(self, said):
        dampened = DampenedHessian(2 * torch.eye(2), 0.01, "fc1")
        dampened.raise_dampening()
        torch.testing.assert_close(dampened.matrix, 2.2 * torch.eye(2))
        dampened.raise_dampening()
        torch.testing.assert_close(dampened.matrix, 4 * torch.eye(2))
        assert said == [
            "The Hessian of fc1 is close to singular: dampening is raised from 0.01 to 0.1.",
            "The Hessian of fc1 is close to singular: dampening is raised from 0.1 to 1.",
        ]

    def test_it_gives_up_at_last(self, said):
        dampened = DampenedHessian(torch.eye(2), 0.01, "fc1")
        for _ in range(RAISES):
            dampened.raise_dampening()
        with pytest.raises(
            ValueError, match="Hessian of fc1 cannot be inverted, even with dampening 1000.*num_samples"
        ):
            dampened.raise_dampening()

    @pytest.mark.parametrize("bad", [torch.nan, torch.inf])
    def test_what_is_not_finite_is_an_error(self, bad):
        hessian = torch.eye(3)
        hessian[1, 1] = bad
        with pytest.raises(ValueError, match="The Hessian of model.fc1 is not finite: its inputs overflow"):
            DampenedHessian(hessian, 0.01, "model.fc1")


class TestDenseTarget:
    def test_the_same_inputs_give_the_weight_back(self):
        x = inputs(100, 12)
        hessian, weight = x.T @ x, weights(5, 12)
        assert torch.equal(dense_target(weight, hessian, hessian, 0.01, "fc1"), weight)

    def test_it_solves_the_least_squares_problem(self):
        """`min ||W X_dense - V X||^2`, for inputs that determine V."""
        dense, weight = inputs(400, 10), weights(5, 10)
        sparse = dense + 0.5 * inputs(400, 10, seed=3)
        exact = torch.linalg.lstsq(sparse.double(), dense.double() @ weight.double().T).solution.T
        found = dense_target(weight, sparse.T @ sparse, dense.T @ sparse, 1e-9, "fc1")
        torch.testing.assert_close(found.double(), exact, atol=1e-2, rtol=1e-2)
        error = (dense.double() @ weight.double().T - sparse.double() @ found.double().T).square().sum()
        least = (dense.double() @ weight.double().T - sparse.double() @ exact.T).square().sum()
        assert error <= 1.0001 * least

    def test_dampening_draws_it_to_the_weight(self):
        """Both diagonals get the same: the more of it, the less the inputs matter."""
        dense, weight = inputs(400, 10), weights(5, 10)
        sparse = 0.5 * dense
        hessian, cross = sparse.T @ sparse, dense.T @ sparse
        torch.testing.assert_close(dense_target(weight, hessian, cross, 1e-6, "p"), 2 * weight, atol=1e-2, rtol=1e-2)
        torch.testing.assert_close(dense_target(weight, hessian, cross, 1e6, "p"), weight, atol=1e-3, rtol=1e-3)
        level = hessian.diagonal().mean().double() * 0.01 * torch.eye(10, dtype=torch.float64)
        expected = weight.double() @ (cross + level) @ torch.linalg.inv(hessian + level)
        torch.testing.assert_close(
            dense_target(weight, hessian, cross, 0.01, "p").double(), expected, atol=1e-3, rtol=1e-3
        )

    def test_the_cross_sum_is_not_symmetric(self):
        """Its rows are the dense model's inputs: transposed it would be another answer."""
        hessian, cross = torch.eye(2), torch.tensor([[1.0, 0.5], [0.0, 1.0]])
        found = dense_target(torch.tensor([[1.0, 0.0]]), hessian, cross, 1e-9, "p")
        torch.testing.assert_close(found, torch.tensor([[1.0, 0.5]]))

    def test_dead_inputs_keep_their_weights_finite(self):
        x = inputs(100, 6)
        x[:, 2] = 0
        weight = weights(3, 6)
        found = dense_target(weight, x.T @ x, x.T @ x, 0.01, "p")
        torch.testing.assert_close(found, weight)

    def test_a_singular_hessian_raises_the_dampening(self, said):
        hessian = torch.eye(4)
        hessian[0, 0] = -0.05
        found = dense_target(weights(3, 4), hessian, hessian, 0.01, "fc1")
        assert torch.isfinite(found).all() and said[0].startswith("The Hessian of fc1 is close to singular")

    @pytest.mark.parametrize("bad", [torch.nan, torch.inf])
    def test_inputs_that_overflow_in_the_dense_model_are_an_error(self, bad):
        cross = torch.eye(4)
        cross[0, 1] = bad
        with pytest.raises(ValueError, match="The inputs of fc1 are not finite in the dense model"):
            dense_target(weights(3, 4), torch.eye(4), cross, 0.01, "fc1")
