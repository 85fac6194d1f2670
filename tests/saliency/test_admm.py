from itertools import combinations

import pytest
import torch
from random_layers import inputs, weights

from optimum_neuronal.saliency import admm as module
from optimum_neuronal.saliency.admm import Unstructured, find_support, fit_support
from optimum_neuronal.saliency.alps import make_support
from optimum_neuronal.saliency.plan import ColumnPattern


def correlation(features: int, seed: int = 0) -> torch.Tensor:
    """A Hessian whose diagonal is 1."""
    return torch.corrcoef(inputs(features, 300, seed).T) * 0.99 + 0.01 * torch.eye(features)


def error(weight: torch.Tensor, sparse: torch.Tensor, matrix: torch.Tensor) -> float:
    missing = weight - sparse
    return float(((missing @ matrix) * missing).sum())


class Counted:
    """Iterations up to a limit, of which those that were run are known."""

    def __init__(self, limit=300):
        self.limit, self.seen = limit, []

    def __iter__(self):
        return (self.seen.append(number) or number for number in range(1, self.limit + 1))


class TestFindSupport:
    def test_among_the_best_of_all_supports_of_a_row(self):
        """By trying them all, of a row of eight weights of which three stay."""
        total, by_size, hits = 0.0, 0.0, 0
        for seed in range(10):
            weight, matrix = weights(1, 8, seed), correlation(8, seed)
            target, support = weight @ matrix, Unstructured(3)

            def fitted(mask, weight=weight, matrix=matrix, target=target):
                return error(weight, fit_support(matrix, target, weight, mask, 8), matrix)

            masks = (torch.isin(torch.arange(8), torch.tensor(kept))[None] for kept in combinations(range(8), 3))
            errors = [fitted(mask) for mask in masks]
            mine = fitted(support(find_support(matrix, target, weight, support, range(1, 301)), True))
            assert sum(other < 0.999 * mine for other in errors) <= 3, "of 56"
            hits += mine <= 1.001 * min(errors)
            total, by_size = total + mine, by_size + fitted(support(weight, True))
        assert hits >= 5 and total < 0.9 * by_size, (total, by_size)

    def test_it_ends_when_the_support_has_settled_or_at_the_limit(self):
        weight, matrix = weights(4, 6), torch.eye(6)
        for count, last in ((24, 3), (10, 60)):
            counted = Counted()
            find_support(matrix, weight @ matrix, weight, Unstructured(count), counted)
            assert counted.seen[-1] % 3 == 0 and counted.seen[-1] <= last, "where all stay, no change is found"
        weight, matrix, counted = weights(40, 30), correlation(30), Counted(7)
        found = find_support(matrix, weight @ matrix, weight, Unstructured(300), counted)
        assert counted.seen == [1, 2, 3, 4, 5, 6, 7] and torch.isfinite(found).all()


class TestFitSupport:
    def test_as_many_steps_as_unknowns_solve_it_exactly(self):
        weight, matrix, mask = weights(5, 12), correlation(12), weights(5, 12, seed=2) > 0.3
        target = weight @ matrix
        found = fit_support(matrix, target, weight, mask, 14)
        assert (found[~mask] == 0).all()
        for row, kept in enumerate(mask):
            exact = torch.linalg.solve(matrix[kept][:, kept].double(), target[row, kept].double())
            torch.testing.assert_close(found[row, kept].double(), exact, atol=1e-3, rtol=1e-3)

    def test_rows_without_weights_or_with_nothing_to_gain_stay_finite(self):
        weight, mask = weights(3, 6), torch.ones(3, 6, dtype=torch.bool)
        mask[1] = False
        assert torch.equal(fit_support(torch.eye(6), weight, weight, mask, 10), weight * mask)


VALUES = torch.tensor([[1.0, -5.0, 2.0, 0.5], [-3.0, 0.1, 4.0, -0.2]])


class TestUnstructured:
    def test_the_largest_by_their_size(self):
        assert Unstructured(3)(VALUES, False).int().tolist() == [[0, 1, 0, 0], [1, 0, 1, 0]]
        for count, all_or_none in ((0, False), (8, True)):
            for kept in (Unstructured(count)(VALUES, False), Unstructured(count)(VALUES, True)):
                assert (kept == all_or_none).all()

    @pytest.mark.parametrize("share", [0.01, 0.3, 0.9])
    def test_a_threshold_that_moves_is_found_as_from_scratch(self, share, monkeypatch):
        """A few sizes are sorted around the last threshold, or all where the new one lies elsewhere."""
        monkeypatch.setattr(module, "SMALL", 1000)
        values = weights(50, 80, seed=0)
        count = int(share * values.numel())
        support = Unstructured(count)
        for step in (0.0, 0.01, 0.01, 0.5, -0.02, 3.0, 0.01):
            values = values * (1 + step) + 0.01 * weights(50, 80, seed=1)
            kept = support(values, False)
            assert kept.sum() == count and values.abs()[kept].min() > values.abs()[~kept].max()


@pytest.mark.parametrize(
    ("sparsity", "pattern", "expected"),
    [
        (torch.tensor([0.75, 0.25], dtype=torch.float64), None, [[0, 1, 0, 0], [1, 0, 1, 1]]),
        (torch.tensor([1.0, 0.0], dtype=torch.float64), None, [[0, 0, 0, 0], [1, 1, 1, 1]]),
        (0.625, None, [[0, 1, 0, 0], [1, 0, 1, 0]]),
        (0.5, ColumnPattern(1, 2), [[0, 1, 1, 0], [1, 0, 1, 0]]),
    ],
)
def test_the_support_of_a_plan(sparsity, pattern, expected):
    """Of every row, of the matrix, of every group; of equal ones, no more."""
    support = make_support((2, 4), sparsity, pattern)
    for exactly in (False, True):
        assert support(VALUES, exactly).int().tolist() == expected
    assert support(torch.ones(2, 4), True).sum() == sum(map(sum, expected))
