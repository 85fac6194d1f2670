"""ALPS against a plain loop in float64, all supports, an exact least-squares solver, and SparseGPT."""

import pytest
import torch
from random_layers import dampened, hessian_of, inputs, solve, weights
from trained import demo_layers, loss, reference_layers

from optimum_neuronal.saliency import alps as module
from optimum_neuronal.saliency import plan
from optimum_neuronal.saliency.alps import ALPS, Unstructured, find_support, make_support
from optimum_neuronal.saliency.plan import ColumnPattern, row_counts
from optimum_neuronal.saliency.sparsegpt import SparseGPT


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


def test_it_is_as_good_as_a_plain_loop_in_float64():
    for sparsity in [0.5, 0.7, 0.9]:
        for name, (weight, hessian) in random_layers().items():
            expected = loss(weight, plain(weight, hessian, sparsity), hessian)
            assert loss(weight, solve(ALPS(), weight, hessian, sparsity), hessian) <= 1.01 * expected, name


def test_it_loses_a_fifth_less_than_sparsegpt():
    for layers in (reference_layers, demo_layers):
        for name in NAMES:
            weight, hessian = layers()[name]
            other = solve(SparseGPT(), weight, hessian, 0.7)
            assert loss(weight, solve(ALPS(), weight, hessian, 0.7), hessian) < 0.8 * loss(weight, other, hessian)


def test_with_a_pattern_it_loses_less_than_sparsegpt():
    weight, hessian = weights(8, 48), hessian_of(48)
    for pattern in [ColumnPattern(2, 4), ColumnPattern(4, 8), ColumnPattern(1, 4)]:
        found, other = (solve(own, weight, hessian, pattern.sparsity, pattern) for own in (ALPS(), SparseGPT()))
        assert loss(weight, found, hessian) < loss(weight, other, hessian)


def test_projections_with_the_same_input_keep_their_own_sparsities():
    together = {name: reference_layers()[f"self_attn.{name}_proj"][0] for name in "qkv"}
    hessian = reference_layers()["self_attn.q_proj"][1]
    rows = torch.linspace(0.4, 0.8, 128, dtype=torch.float64)
    sparsities = {"q": 0.5, "k": rows, "v": 0.93}
    found = ALPS().solve(together, hessian, sparsities)
    assert list(found) == ["q", "k", "v"]
    for name, sparsity in (("q", 0.5), ("v", 0.93)):
        assert abs((found[name] == 0).sum().item() - sparsity * 128 * 128) <= 1
    assert torch.equal((found["k"] == 0).sum(dim=1), row_counts(rows, (128, 128)))
    for name, weight in together.items():
        alone = solve(ALPS(), weight, hessian, sparsities[name])
        assert loss(weight, found[name], hessian) == pytest.approx(loss(weight, alone, hessian), rel=0.03)


def test_iterations_end_when_the_support_has_settled_or_at_the_limit():
    for weight, matrix, count, limit, expected in (
        (weights(4, 6), torch.eye(6), 24, 300, [3]),  # where all stay, no change is found
        (weights(4, 6), torch.eye(6), 10, 300, range(3, 61, 3)),
        (weights(40, 30), torch.corrcoef(inputs(30).T), 300, 7, [7]),
    ):
        calls, support = [], Unstructured(count)

        def counted(values, exactly, calls=calls, support=support):
            calls.append(values)
            return support(values, exactly)

        find_support(matrix, weight @ matrix, weight, counted, limit)
        assert len(calls) - 1 in expected, "one for the beginning"


VALUES = torch.tensor([[1.0, -5.0, 2.0, 0.5], [-3.0, 0.1, 4.0, -0.2]])


@pytest.mark.parametrize("share", [0.01, 0.3, 0.9])
def test_a_threshold_that_moves_is_found_as_from_scratch(share, monkeypatch):
    """A few sizes are sorted around the last threshold, or all where the new one lies elsewhere."""
    monkeypatch.setattr(module, "SMALL", 1000)
    values = weights(50, 80, seed=0)
    count = int(share * values.numel())
    support = Unstructured(count)
    for step in (0.0, 0.01, 0.01, 0.5, -0.02, 3.0, 0.01):
        values = values * (1 + step) + 0.01 * weights(50, 80, seed=1)
        kept = support(values, False)
        assert kept.sum() == count and values.abs()[kept].min() > values.abs()[~kept].max()


def test_an_accelerators_way_finds_the_same_masks(monkeypatch):
    """On a CPU here."""
    layers = random_layers() | {name: reference_layers()[name] for name in ("self_attn.k_proj", "mlp.down_proj")}
    expected = {name: solve(ALPS(), *layer, 0.7) for name, layer in layers.items()}
    for each in (module, plan):
        monkeypatch.setattr(each, "on_cpu", lambda _: False)
    for name, (weight, hessian) in layers.items():
        found = solve(ALPS(), weight, hessian, 0.7)
        assert torch.equal(found, expected[name])


def test_an_iteration_does_not_wait_for_an_accelerator():
    """Tensors without data stand for a device's: whatever asks for a number fails."""
    values, rows = torch.empty(6, 8, device="meta"), torch.linspace(0, 1, 6, dtype=torch.float64)
    for sparsity, pattern in ((0.5, None), (1.0, None), (rows, None), (0.5, ColumnPattern(2, 4))):
        support = make_support(values, sparsity, pattern)
        for exactly in (False, True):
            assert support(values, exactly).shape == (6, 8)


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
    support = make_support(VALUES, sparsity, pattern)
    for exactly in (False, True):
        assert support(VALUES, exactly).int().tolist() == expected
    assert support(torch.ones(2, 4), True).sum() == sum(map(sum, expected))
