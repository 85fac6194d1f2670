"""ALPS against a plain loop in float64, all supports, an exact least-squares solver, SparseGPT, and counts by hand."""

from functools import lru_cache
from itertools import combinations

import pytest
import torch
from random_layers import dampened, hessian_of, inputs, weights
from trained import demo_layers, loss, reference_layers

from optimum_neuronal.saliency import alps as module
from optimum_neuronal.saliency.alps import ALPS, Unstructured, find_support, fit_support, make_support, smallest_kept
from optimum_neuronal.saliency.plan import ColumnPattern, row_counts
from optimum_neuronal.saliency.sparsegpt import SparseGPT


TRAINED = {"reference": reference_layers, "demo": demo_layers}
NAMES = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]


def random_layers() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    shapes = [(48, 32), (32, 80), (7, 100)]
    return {str(shape): (weights(*shape), hessian_of(shape[1])) for shape in shapes}


def plain(weight: torch.Tensor, hessian: torch.Tensor, sparsity: float) -> torch.Tensor:
    """The formulas as they stand in the paper's notation, in float64, unknowns of shape (in, out)."""
    hessian = dampened(hessian)
    scale = hessian.diag().sqrt()
    matrix = hessian / torch.outer(scale, scale)
    start = (weight.double() * scale).T
    target = matrix @ start
    k = round(weight.numel() * (1 - sparsity))

    def largest(values: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(values.numel(), dtype=torch.bool)
        mask[values.abs().flatten().topk(k).indices] = True
        return mask.view(values.shape)

    support = before = largest(start)
    dense, sparse, dual, rho = start, start * support, torch.zeros_like(start), 0.1
    identity = torch.eye(len(matrix), dtype=torch.float64)
    for iteration in range(1, 301):
        dense = torch.linalg.solve(matrix + rho * identity, target - dual + rho * sparse)
        support = largest(dense + dual / rho)
        sparse = (dense + dual / rho) * support
        dual = dual + rho * (dense - sparse)
        if iteration % 3 == 0:
            changed, before = int((support != before).sum()), support
            if changed == 0 or (iteration >= 30 and changed < 0.0003 * k):
                break
            rho *= 1.3 if changed >= 0.1 * k else 1.2 if changed >= 0.005 * k else 1.1
    support = largest(dense)
    solution = dense * support
    residual = (target - matrix @ solution) * support
    direction = residual
    for _ in range(10):
        moved = (matrix @ direction) * support
        length = residual.square().sum(dim=0) / (direction * moved).sum(dim=0).clamp(min=1e-300)
        solution = solution + length * direction
        following = residual - length * moved
        ratio = following.square().sum(dim=0) / residual.square().sum(dim=0).clamp(min=1e-300)
        direction = following + ratio * direction
        residual = following
    return (solution / scale[:, None]).T


def least_squares(weight: torch.Tensor, hessian: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Row by row, the best weights that are zero where the mask is False, solved exactly in float64."""
    best, target = torch.zeros(weight.shape, dtype=torch.float64), weight.double() @ hessian
    for row, kept in enumerate(mask):
        best[row, kept] = torch.linalg.solve(hessian[kept][:, kept], target[row, kept])
    return best


@lru_cache
def solved(model: str, name: str) -> torch.Tensor:
    """A projection of a trained model, pruned to 70 %."""
    return ALPS().prune(*TRAINED[model]()[name], 0.7)


def test_it_is_as_good_as_a_plain_loop_in_float64():
    for sparsity in [0.5, 0.7, 0.9]:
        for name, (weight, hessian) in random_layers().items():
            expected = loss(weight, plain(weight, hessian, sparsity), hessian)
            assert loss(weight, ALPS().prune(weight, hessian, sparsity), hessian) <= 1.01 * expected, name


def test_it_loses_a_fifth_less_than_sparsegpt():
    for model, layers in TRAINED.items():
        for name in NAMES:
            weight, hessian = layers()[name]
            other = SparseGPT().prune(weight, hessian, 0.7)
            assert loss(weight, solved(model, name), hessian) < 0.8 * loss(weight, other, hessian)


def test_weights_that_stay_have_their_best_values():
    """Conjugate gradients come within a thousandth of an exact solver on the same support."""
    for name in NAMES:
        weight, hessian = reference_layers()[name]
        found, hessian = solved("reference", name), dampened(hessian)
        best = least_squares(weight, hessian, found != 0)
        assert loss(weight, found, hessian) <= 1.001 * loss(weight, best, hessian)


def test_the_target_is_hit_within_one_weight():
    for shape in [(5, 7), (16, 60), (600, 128)]:
        weight, hessian = weights(*shape), hessian_of(shape[1])
        for sparsity in [0.0, 0.01, 0.6, 0.7, 0.99, 1.0]:
            found = ALPS(iterations=12).prune(weight, hessian, sparsity)
            assert abs((found == 0).sum().item() - sparsity * weight.numel()) <= 1
            assert torch.isfinite(found).all()
            if sparsity == 0:
                torch.testing.assert_close(found, weight, atol=1e-3, rtol=1e-3)


def test_patterns_are_kept_in_every_group():
    weight, hessian = weights(8, 48), hessian_of(48)
    for pattern in [ColumnPattern(2, 4), ColumnPattern(4, 8), ColumnPattern(1, 4)]:
        found, other = (own.prune(weight, hessian, pattern.sparsity, pattern) for own in (ALPS(), SparseGPT()))
        assert ((found.view(8, -1, pattern.group) != 0).sum(dim=-1) == pattern.kept).all()
        assert loss(weight, found, hessian) < loss(weight, other, hessian)


def test_dead_inputs_lose_their_weights_first():
    weight, hessian = weights(6, 10), hessian_of(10)
    hessian[3] = hessian[:, 3] = 0
    weight[:, 3] = 100
    found = ALPS().prune(weight, hessian, 0.1)
    assert (found[:, 3] == 0).all() and (found == 0).sum() == 6
    alive = [column for column in range(10) if column != 3]
    torch.testing.assert_close(found[:, alive], weight[:, alive], atol=1e-3, rtol=1e-3)
    nothing = ALPS().prune(weights(3, 8), torch.zeros(8, 8), 0.5)
    assert (nothing == 0).sum() == 12 and torch.isfinite(nothing).all()


@pytest.mark.parametrize("pattern", [None, ColumnPattern(2, 4)])
def test_no_more_weights_of_dead_inputs_are_pruned_than_asked_for(pattern):
    weight, hessian = weights(6, 12), hessian_of(12)
    hessian[2:9] = hessian[:, 2:9] = 0
    found = ALPS().prune(weight, hessian, 0.5 if pattern else 0.25, pattern)
    assert (found == 0).sum() == (36 if pattern else 18)
    kept = (found != 0) & (hessian.diagonal() == 0)
    assert kept.any() and torch.equal(found[kept], weight[kept])


def test_projections_with_the_same_input_keep_their_own_sparsities():
    together = {name: reference_layers()[f"self_attn.{name}_proj"][0] for name in "qkv"}
    hessian = reference_layers()["self_attn.q_proj"][1]
    rows = torch.linspace(0.4, 0.8, 128, dtype=torch.float64)
    sparsities = {"q": 0.5, "k": rows, "v": 0.93}
    changes = ALPS().solve(together, hessian, sparsities, torch.float32)
    assert list(changes) == ["q", "k", "v"]
    found = {name: change.weight for name, change in changes.items()}
    for name, sparsity in (("q", 0.5), ("v", 0.93)):
        assert abs((found[name] == 0).sum().item() - sparsity * 128 * 128) <= 1
    assert torch.equal((found["k"] == 0).sum(dim=1), row_counts(rows, (128, 128)))
    for name, weight in together.items():
        alone = ALPS().prune(weight, hessian, sparsities[name])
        assert loss(weight, found[name], hessian) == pytest.approx(loss(weight, alone, hessian), rel=0.03)


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
            assert smallest_kept(values.abs().flatten(), count) == values.abs()[kept].min(), "as on an accelerator"


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
