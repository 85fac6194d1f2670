from dataclasses import dataclass

import pytest
import torch
from by_hand import make_block, make_experts
from random_layers import hessian_of as random_hessian
from random_layers import solve, weights
from torch import nn

from optimum_neuronal.blocks.statistics import Hessian, SquaredNorms
from optimum_neuronal.model.change import NewWeight
from optimum_neuronal.model.projections import Projection
from optimum_neuronal.saliency import SALIENCIES, Inputs
from optimum_neuronal.saliency import base as module
from optimum_neuronal.saliency.alps import ALPS
from optimum_neuronal.saliency.base import WeightUpdate, solve_dampened
from optimum_neuronal.saliency.magnitude import Magnitude
from optimum_neuronal.saliency.plan import ColumnPattern, Plan
from optimum_neuronal.saliency.sparsegpt import SparseGPT
from optimum_neuronal.saliency.wanda import Wanda


@pytest.mark.parametrize("name", SALIENCIES.names())
def test_contract(name):
    saliency = SALIENCIES.get(name)()
    weight, activation = weights(5, 7), weights(1, 7)[0].abs() if saliency.uses_activations else None
    copy = weight.clone()
    score = saliency.score(weight, activation)
    assert score.shape == weight.shape and score.dtype == torch.float32
    assert torch.isfinite(score).all() and (score >= 0).all()
    assert torch.equal(weight, copy) and torch.equal(score, saliency.score(weight, activation))
    assert torch.equal(saliency.score(-weight, activation), score), "the sign of a weight does not matter"


def norms(*values, tokens):
    return SquaredNorms([torch.tensor([values])], tokens)


def hessian_of(*inputs):
    statistic = Hessian()
    statistic.update(torch.tensor([inputs]), 1)
    return statistic


class TestInputs:
    def test_an_activation_is_the_root_of_the_mean_over_sequences(self):
        projection = Projection("q", "query", nn.Linear(2, 4), True)
        inputs = Inputs.of([projection], {"q": SquaredNorms([torch.tensor([[1.0, 9.0], [7, 23]])], tokens=1)}, 32)
        assert inputs.activations["q"].tolist() == [2, 4]
        assert inputs.starved == [], "few tokens matter only to experts"

    def test_a_starved_expert_gets_the_level_of_the_others_or_one_where_all_starve(self):
        projections = make_experts(3).pruned
        statistics = {
            "experts.0.up": norms(1.0, 9.0, tokens=40),  # mean square 5
            "experts.1.up": norms(100.0, 0.0, tokens=31),
            "experts.2.up": norms(4.0, 22.0, tokens=32),  # mean square 13
        }
        some = Inputs.of(projections, statistics, 32)
        assert some.starved == ["experts.1.up"] and some.activations["experts.0.up"].tolist() == [1, 3]
        assert some.activations["experts.1.up"].tolist() == pytest.approx([3] * 4), "the root of the mean of 5 and 13"
        assert Inputs.of(projections, statistics, 31).starved == []
        all_of_them = Inputs.of(projections, statistics, 41)
        assert all_of_them.starved == list(statistics)
        assert {values.unique().item() for values in all_of_them.activations.values()} == {1}


BLOCK = [[3, 1], [1, -2]]  # saliency 3 2 and 1 4
WANDA = Inputs(activations={"block.0": torch.tensor([1.0, 2.0])})
HALF = Plan({"block.0": 0.5})


class TestScores:
    def test_the_least_salient_weights_of_every_row_or_group_are_pruned(self):
        projections = make_block(BLOCK).pruned
        for plan, pattern in ((HALF, None), (Plan({"block.0": 0.0}), ColumnPattern(1, 2))):
            changes = Wanda().changes(projections, WANDA, plan, pattern)
            assert changes["block.0"].mask.tolist() == [[True, False], [False, True]]

    def test_a_saliency_that_scores_something_else(self):
        wrong = type("Wrong", (Magnitude,), {"score": lambda self, weight, activation: torch.ones(2)})
        with pytest.raises(ValueError, match=r"Wrong.score returned shape \[2\] for block.0: expected \[2, 2\]"):
            wrong().changes(make_block(BLOCK).pruned, Inputs(), HALF)

    def test_a_saliency_may_compute_in_place(self):
        (projection,) = make_block(BLOCK).pruned
        score = {"score": lambda self, weight, own: weight.abs_().mul_(own.mul_(2))}
        in_place = type("InPlace", (Magnitude,), score)()
        assert in_place.score_of(projection, WANDA).tolist() == [[6, 4], [2, 8]]
        assert projection.weight.tolist() == BLOCK and WANDA.activations["block.0"].tolist() == [1, 2]


@dataclass(frozen=True)
class Third(WeightUpdate):
    """Makes every weight 1/3, in place, and notes what it was given."""

    calls: list

    def solve(self, weights, hessian, sparsities, pattern=None):
        dtypes = {weight.dtype for weight in weights.values()}
        self.calls.append((dtypes, hessian.tolist(), {name: sparsities[name] for name in weights}, pattern))
        return {name: weight.fill_(1 / 3) for name, weight in weights.items()}


class TestWeightUpdates:
    def test_the_new_weight_has_the_dtype_of_the_old_one(self):
        (projection,), saliency, pattern = make_block(BLOCK).pruned, Third([]), ColumnPattern(1, 2)
        projection.owner.data = projection.owner.data.bfloat16()
        inputs = Inputs.of([projection], {"block.0": hessian_of([1.0, 0.0], [1.0, 2.0])})
        change = saliency.changes([projection], inputs, HALF, pattern)["block.0"]
        assert type(change) is NewWeight and torch.equal(change.weight, torch.full((2, 2), 1 / 3).bfloat16())
        assert projection.weight.tolist() == BLOCK, "the solver computed in place in a copy"
        assert saliency.calls == [({torch.float32}, [[2, 2], [2, 4]], {"block.0": 0.5}, pattern)]

    def test_a_starved_experts_hessian_is_flat(self):
        """Expert 1 received one token of the two that it needs: expert 0's mean square, 5, stands for its inputs."""
        projections, saliency = make_experts(2, (4, 2)).pruned, Third([])
        statistics = {"experts.0.up": hessian_of([1.0, 3.0], [0.0, 0.0]), "experts.1.up": hessian_of([7.0, 7.0])}
        inputs = Inputs.of(projections, statistics, 2)
        saliency.changes(projections, inputs, Plan.uniform(statistics, 0.5))
        first, second = (hessian for _, hessian, *_ in saliency.calls)
        assert first == [[1, 3], [3, 9]] and sum(second, []) == pytest.approx([5, 0, 0, 5])

    def test_projections_with_the_same_input_are_solved_together(self):
        """One call for each input, in the order in which the inputs come."""
        names = {"q": 2, "o": 3, "k": 2}
        projections = [Projection(name, name, nn.Linear(columns, 2), True) for name, columns in names.items()]
        shared, other, saliency = hessian_of([1.0, 2.0]), hessian_of([1.0, 2.0, 3.0]), Third([])
        inputs = Inputs.of(projections, {"q": shared, "o": other, "k": shared})
        changes = saliency.changes(projections, inputs, Plan.uniform(names, 0.5))
        assert [list(sparsities) for _, _, sparsities, _ in saliency.calls] == [["q", "k"], ["o"]]
        assert set(changes) == set(names)


class TestSolveDampened:
    def test_a_share_of_the_mean_diagonal_is_added(self):
        hessian = torch.tensor([[2.0, 1.0], [1.0, 4.0]])
        dampened = solve_dampened(hessian, 0.1, "fc1", torch.clone)
        torch.testing.assert_close(dampened, torch.tensor([[2.3, 1.0], [1.0, 4.3]]))
        assert hessian.tolist() == [[2.0, 1.0], [1.0, 4.0]], "not changed"

    @pytest.mark.parametrize(("diagonal", "expected"), [([2.0, 0.0, 4.0], [3, 2, 5]), ([0.0, 0.0], [1.5, 1.5])])
    def test_dead_inputs_count_as_one(self, diagonal, expected):
        dampened = solve_dampened(torch.diag(torch.tensor(diagonal)), 0.5, "fc1", torch.clone)
        assert dampened.diagonal().tolist() == expected

    def test_dampening_is_raised_tenfold_until_an_attempt_succeeds_or_it_gives_up(self, monkeypatch):
        diagonals, warnings = [], []
        monkeypatch.setattr(module.logger, "warning", warnings.append)

        def attempt(matrix):
            diagonals.append(matrix[0, 0].item())
            return "found" if len(diagonals) == 3 else None

        assert solve_dampened(2 * torch.eye(2), 0.01, "fc1", attempt) == "found"
        assert diagonals == pytest.approx([2.02, 2.2, 4])
        assert warnings[1] == "The Hessian of fc1 is close to singular: dampening is raised from 0.1 to 1."
        with pytest.raises(ValueError, match="Hessian of fc1 cannot be inverted, even with dampening 1000.*num_samp"):
            solve_dampened(2 * torch.eye(2), 0.01, "fc1", lambda matrix: None)

    @pytest.mark.parametrize("bad", [torch.nan, torch.inf])
    def test_what_is_not_finite_is_an_error(self, bad):
        with pytest.raises(ValueError, match="The Hessian of model.fc1 is not finite: load the model in"):
            solve_dampened(torch.diag(torch.tensor([1.0, bad])), 0.01, "model.fc1", torch.clone)


WEIGHT = torch.tensor([[1.0, -2.0], [-3.0, 0.5]])
ACTIVATION = torch.tensor([2.0, 4.0])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("magnitude", [[1, 2], [3, 0.5]]),
        ("wanda", [[2, 8], [6, 2]]),
        # |W| a = [[2, 8], [6, 2]]: means over the rows 5 and 4, over the columns 4 and 5
        ("multiflow", [[1 * 5 * 4, 2 * 5 * 5], [3 * 4 * 4, 0.5 * 4 * 5]]),
        # shares of the rows: [1/3, 2/3], [6/7, 1/7]; of the columns: [1/4, 3/4], [4/5, 1/5]; times [2, 4] ** 0.5
        ("ria", [[(1 / 3 + 1 / 4) * 2**0.5, (2 / 3 + 4 / 5) * 2], [(6 / 7 + 3 / 4) * 2**0.5, (1 / 7 + 1 / 5) * 2]]),
    ],
)
def test_by_hand(name, expected):
    torch.testing.assert_close(SALIENCIES.get(name)().score(WEIGHT, ACTIVATION), torch.tensor(expected).float())


def test_ria_without_weights_is_finite_and_its_power_is_not_negative():
    assert torch.isfinite(SALIENCIES.get("ria")().score(torch.zeros(2, 2), ACTIVATION)).all()
    with pytest.raises(ValueError, match="power is -1"):
        SALIENCIES.make("ria", "saliency_args", {"power": -1})


# What holds for all saliencies that update weights.


@pytest.fixture(params=[SparseGPT, ALPS])
def method(request):
    return request.param


def with_dead_inputs(rows: int, features: int, dead: slice):
    """A weight and the Hessian of inputs of which some are always zero."""
    weight, hessian = weights(rows, features), random_hessian(features)
    hessian[dead] = hessian[:, dead] = 0
    return weight, hessian


@pytest.mark.parametrize("shape", [(5, 7), (16, 300), (600, 128)])
@pytest.mark.parametrize("sparsity", [0.0, 0.01, 0.6, 0.7, 0.99, 1.0])
def test_the_target_is_hit_within_one_weight(method, shape, sparsity):
    saliency = ALPS(iterations=6) if method is ALPS else method()
    sparse = solve(saliency, weights(*shape), random_hessian(shape[1]), sparsity)
    assert abs((sparse == 0).sum().item() - sparsity * sparse.numel()) <= 1 and torch.isfinite(sparse).all()


@pytest.mark.parametrize("pattern", [ColumnPattern(2, 4), ColumnPattern(4, 8), ColumnPattern(1, 4)], ids=str)
def test_patterns_are_kept_in_every_group(method, pattern):
    sparse = solve(method(), weights(8, 48), random_hessian(48), pattern.sparsity, pattern)
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
