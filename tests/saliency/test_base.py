"""Contract tests run over the registry, so that a new method is tested by being there."""

import pytest
import torch

from optimum_neuronal.saliency import SALIENCIES
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


@pytest.mark.parametrize("name", UPDATING)
@pytest.mark.parametrize(
    "sparsity, pattern, message",
    [
        (-0.1, None, r"fc1 was given the sparsity -0.1 to -0.1: expected one in \[0, 1\]"),
        (1.5, None, "fc1 was given the sparsity 1.5"),
        (float("nan"), None, "fc1 was given the sparsity nan"),
        (0.4, ColumnPattern(3, 5), "fc1 has 8 input features, not a multiple of 5 as 3:5 needs"),
    ],
)
def test_what_cannot_be_asked_is_refused_before_the_work(name, sparsity, pattern, message):
    with pytest.raises(ValueError, match=message):
        SALIENCIES.get(name)().prune(torch.ones(3, 8), torch.eye(8), sparsity, pattern, "fc1")


@pytest.mark.parametrize("name", BY_ROW)
@pytest.mark.parametrize(
    "rows, pattern, message",
    [
        ([0.5, 1.25, 0.5], None, "fc1 was given the sparsity 0.5 to 1.25"),
        ([0.5, -0.25, 0.5], None, "fc1 was given the sparsity -0.25 to 0.5"),
        ([0.5, 0.5], None, r"sparsity of shape \[2\]: expected a number, or one for each of its 3 rows"),
        (
            [0.25, 0.75, 0.5],
            ColumnPattern(2, 4),
            "rows of unequal sparsity, but the pattern 2:4 prunes every row alike",
        ),
    ],
)
def test_rows_that_cannot_be_asked_are_refused_before_the_work(name, rows, pattern, message):
    """More weights than a row has, fewer than none, and rows that a pattern contradicts."""
    rows = torch.tensor(rows, dtype=torch.float64)
    with pytest.raises(ValueError, match=message):
        SALIENCIES.get(name)().prune(torch.ones(3, 8), torch.eye(8), rows, pattern, "fc1")


@pytest.mark.parametrize("name", BY_ROW)
def test_rows_of_one_sparsity_go_together_with_a_pattern(name):
    rows = torch.full((3,), 0.5, dtype=torch.float64)
    found = SALIENCIES.get(name)().prune(torch.randn(3, 8), torch.eye(8), rows, ColumnPattern(2, 4))
    assert ((found.view(3, 2, 4) != 0).sum(dim=-1) == 2).all()
