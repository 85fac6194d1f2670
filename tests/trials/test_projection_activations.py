import pytest
import torch
from torch import nn

from optimum_neuronal.engine.statistics import SquaredNorms
from optimum_neuronal.model.projections import Block, Projection
from optimum_neuronal.trials.projection_activations import projection_activations


def mixture(experts=3, features=2):
    module = nn.Module()
    module.up = nn.Parameter(torch.zeros(experts, 4, features))
    projections = [Projection(f"mlp.experts.{e}.up", "up", module, True, "up", e) for e in range(experts)]
    return Block("block", module, {projection.name: projection for projection in projections})


def norms(*values, tokens):
    return SquaredNorms.of(torch.tensor(values), tokens)


def test_an_activation_is_the_root_of_the_mean_over_sequences():
    linear = nn.Linear(2, 4)
    names = {"q": Projection("q", "query", linear, True), "left out": Projection("left out", "key", linear, False)}
    block = Block("block", linear, names)
    found, starved = projection_activations(block.pruned, {"q": norms([1.0, 9.0], [7, 23], tokens=1)}, 32)
    assert list(found) == ["q"] and found["q"].tolist() == [2, 4]
    assert starved == [], "few tokens matter only to experts"


def test_a_starved_expert_gets_the_level_of_the_others():
    block = mixture()
    measured = {
        "mlp.experts.0.up": norms([1.0, 9.0], tokens=40),  # mean square 5
        "mlp.experts.1.up": norms([100.0, 0.0], tokens=31),
        "mlp.experts.2.up": norms([4.0, 22.0], tokens=32),  # mean square 13
    }
    found, starved = projection_activations(block.pruned, measured, 32)
    assert starved == ["mlp.experts.1.up"]
    assert found["mlp.experts.1.up"].tolist() == pytest.approx([3, 3]), "the root of the mean of 5 and 13"
    assert found["mlp.experts.0.up"].tolist() == [1, 3]
    assert projection_activations(block.pruned, measured, 31)[1] == []


def test_where_all_experts_starve_every_feature_counts_one():
    block = mixture(experts=2)
    measured = {name: norms([1.0, 9.0], tokens=3) for name in block.projections}
    found, starved = projection_activations(block.pruned, measured, 4)
    assert starved == list(block.projections)
    assert all(values.tolist() == [1, 1] for values in found.values())
