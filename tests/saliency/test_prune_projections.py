from dataclasses import dataclass

import pytest
import torch
from by_hand import make_block
from torch import nn

from optimum_neuronal.blocks.statistics import Hessian, SquaredNorms
from optimum_neuronal.model.change import NewWeight, Zeros
from optimum_neuronal.model.projections import Block, Projection
from optimum_neuronal.saliency import prune_projections as module
from optimum_neuronal.saliency.base import WeightUpdate
from optimum_neuronal.saliency.magnitude import Magnitude
from optimum_neuronal.saliency.plan import ColumnPattern, Plan
from optimum_neuronal.saliency.prune_projections import (
    find_activations,
    prune_projections,
    score_projection,
    trial_changes,
)
from optimum_neuronal.saliency.wanda import Wanda


NORMS = {"block.0": SquaredNorms([torch.tensor([[1.0, 4.0]])], tokens=3)}  # activations 1 and 2


@pytest.fixture
def block():
    return make_block([[3, 1], [1, -2]])  # saliency 3 2 and 1 4


def masks_of(changes, block):
    (projection,) = block.pruned
    made = [change_of(projection) for change_of in changes]
    assert all(type(change) is Zeros for change in made)
    return [change.mask.tolist() for change in made]


def plan(sparsity):
    return Plan({"block.0": sparsity})


def test_plans_cut_the_least_salient_weights_of_every_row_from_one_ranking(block, monkeypatch):
    ranked, sort_rows = [], module.sort_rows
    monkeypatch.setattr(module, "sort_rows", lambda score: ranked.append(1) or sort_rows(score))
    rows = torch.tensor([1.0, 0.0], dtype=torch.float64)
    changes = trial_changes(Wanda(), block, NORMS, [plan(0.5), plan(0.0), plan(rows)])
    assert masks_of(changes, block) == [
        [[True, False], [False, True]],
        [[True, True], [True, True]],
        [[False, False], [True, True]],
    ]
    assert len(ranked) == 1


def test_a_pattern_decides_instead_of_the_plan():
    block = make_block([[1, 2, 4, 3]])
    norms = {"block.0": SquaredNorms([torch.ones(1, 4)], tokens=1)}
    changes = trial_changes(Wanda(), block, norms, [plan(0.0), plan(0.5)], ColumnPattern.parse("1:2"))
    assert masks_of(changes, block) == 2 * [[[False, True, True, False]]]
    assert masks_of(trial_changes(Wanda(), block, norms, [plan(0.5)]), block) == [[[False, False, True, True]]]


@dataclass(frozen=True)
class Update(WeightUpdate):
    """Makes every weight 1/3, and notes what it was given."""

    given: list

    def score(self, weight, activation):
        return weight.abs() * activation

    def prune(self, weight, hessian, sparsity, pattern=None, name="the weight"):
        self.given.append((weight.dtype, hessian.tolist(), sparsity, pattern, name))
        return torch.full_like(weight, 1 / 3)


def hessian_of(*inputs):
    norms = Hessian()
    norms.update(torch.tensor([inputs]), 1)
    return norms


def test_a_saliency_may_give_a_new_weight(block):
    (projection,), saliency = block.pruned, Update([])
    projection.owner.data = projection.owner.data.bfloat16()
    norms, pattern = {"block.0": hessian_of([1.0, 0.0], [1.0, 2.0])}, ColumnPattern.parse("1:2")
    for change_of in trial_changes(saliency, block, norms, [plan(0.5), plan(0.25)], pattern):
        change = change_of(projection)
        assert type(change) is NewWeight and change.weight.dtype == torch.bfloat16
        assert torch.equal(change.weight, torch.full((2, 2), 1 / 3).bfloat16())
    asked = (torch.float32, [[2, 2], [2, 4]])
    assert saliency.given == [(*asked, 0.5, pattern, "block.0"), (*asked, 0.25, pattern, "block.0")]


def test_for_a_trial_its_score_alone_may_do(block):
    saliency, norms = Update([]), {"block.0": hessian_of([1.0, 2.0])}
    changes = trial_changes(saliency, block, norms, [plan(0.5)], updates=False)
    assert masks_of(changes, block) == [[[True, False], [False, True]]] and not saliency.given


def mixture(experts, features=2):
    module = nn.Module()
    module.up = nn.Parameter(torch.zeros(experts, 4, features))
    projections = [Projection(f"experts.{e}.up", "up", module, True, "up", e) for e in range(experts)]
    return Block("block", module, {projection.name: projection for projection in projections})


def test_a_starved_experts_hessian_is_flat():
    """Expert 1 received one token of the two that it takes: expert 0's mean square, 5, stands for its inputs."""
    block, saliency = mixture(2), Update([])
    norms = {"experts.0.up": hessian_of([1.0, 3.0], [0.0, 0.0]), "experts.1.up": hessian_of([7.0, 7.0])}
    assert find_activations(block.pruned, norms, 2)[1] == ["experts.1.up"]
    plan = Plan(dict.fromkeys(block.projections, 0.5))
    (change_of,) = trial_changes(saliency, block, norms, [plan], min_tokens=2)
    for expert in block.pruned:
        change_of(expert)
    assert saliency.given[0][1] == [[1, 3], [3, 9]]
    assert torch.tensor(saliency.given[1][1]).flatten().tolist() == pytest.approx([5, 0, 0, 5])


def test_projections_with_the_same_input_are_solved_together():
    """One call for each input, in the order in which the inputs come; others have a Hessian of their own."""
    module = nn.Module()
    projections = []
    for name, columns in (("q", 2), ("o", 3), ("k", 2)):
        setattr(module, name, nn.Linear(columns, 2))
        projections.append(Projection(name, name, getattr(module, name), False))
    first, second = hessian_of([1.0, 2.0]), hessian_of([1.0, 2.0, 3.0])
    together = []

    @dataclass(frozen=True)
    class Noted(Update):
        def solve(self, weights, hessian, *args):
            together.append((list(weights), hessian is first.hessian))
            return super().solve(weights, hessian, *args)

    norms = {"q": first, "o": second, "k": first}
    found, _ = prune_projections(Noted([]), projections, norms, Plan(dict.fromkeys("qok", 0.5)))
    assert together == [(["q", "k"], True), (["o"], False)] and set(found) == {"q", "o", "k"}


def test_a_saliency_that_scores_something_else(block):
    wrong = type("Wrong", (Magnitude,), {"score": lambda self, weight, activation: torch.ones(2)})
    with pytest.raises(ValueError, match=r"Wrong.score returned shape \[2\] for block.0: expected \[2, 2\]"):
        trial_changes(wrong(), block, NORMS, [plan(0.5), plan(0.1)])


def activations_of(block, measured, min_expert_tokens):
    return find_activations(block.pruned, measured, min_expert_tokens)


def norms(*values, tokens):
    return SquaredNorms([torch.tensor(values)], tokens)


def test_an_activation_is_the_root_of_the_mean_over_sequences():
    linear = nn.Linear(2, 4)
    names = {"q": Projection("q", "query", linear, True), "left out": Projection("left out", "key", linear, False)}
    block = Block("block", linear, names)
    found, starved = activations_of(block, {"q": norms([1.0, 9.0], [7, 23], tokens=1)}, 32)
    assert list(found) == ["q"] and found["q"].tolist() == [2, 4]
    assert starved == [], "few tokens matter only to experts"


def test_a_starved_expert_gets_the_level_of_the_others_or_one_where_all_starve():
    block = mixture(3)
    measured = {
        "experts.0.up": norms([1.0, 9.0], tokens=40),  # mean square 5
        "experts.1.up": norms([100.0, 0.0], tokens=31),
        "experts.2.up": norms([4.0, 22.0], tokens=32),  # mean square 13
    }
    found, starved = activations_of(block, measured, 32)
    assert starved == ["experts.1.up"]
    assert found["experts.1.up"].tolist() == pytest.approx([3, 3]), "the root of the mean of 5 and 13"
    assert found["experts.0.up"].tolist() == [1, 3]
    assert activations_of(block, measured, 31)[1] == []
    found, starved = activations_of(block, measured, 41)
    assert starved == list(block.projections) and all(values.tolist() == [1, 1] for values in found.values())


def test_a_saliency_may_compute_in_place():
    block = make_block([[3, 1], [1, -2]])
    (projection,), activations = block.pruned, {"block.0": torch.tensor([1.0, 2.0])}
    scores = type("InPlace", (Magnitude,), {"score": lambda self, weight, own: weight.abs_().mul_(own.mul_(2))})
    assert score_projection(scores(), projection, activations).tolist() == [[6, 4], [2, 8]]
    solves = type("InPlace", (Update,), {"prune": lambda self, weight, *_args, **_named: weight.zero_()})
    norms, plan = {"block.0": hessian_of([1.0, 2.0])}, Plan({"block.0": 0.5})
    assert not prune_projections(solves([]), block.pruned, norms, plan)[0]["block.0"].weight.any()
    assert projection.weight.tolist() == [[3, 1], [1, -2]] and activations["block.0"].tolist() == [1, 2]
