import pytest
import torch

from optimum_neuronal.saliency import supports
from optimum_neuronal.saliency.supports import OfGroups, OfParts, OfRows, OfWhole
from optimum_neuronal.sparsity.masks import ColumnPattern


VALUES = torch.tensor([[1.0, -5.0, 2.0, 0.5], [-3.0, 0.1, 4.0, -0.2]])


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_the_largest_of_a_whole_weight_by_their_size():
    assert OfWhole(3).kept(VALUES).int().tolist() == [[0, 1, 0, 0], [1, 0, 1, 0]]
    assert not OfWhole(0).kept(VALUES).any() and OfWhole(8).kept(VALUES).all()
    assert not OfWhole(0).exactly(VALUES).any() and OfWhole(8).exactly(VALUES).all()


def test_of_equal_ones_the_later_stay_where_it_has_to_be_exact():
    support, values = OfWhole(3), torch.tensor([[1.0, 1.0], [1.0, -1.0], [0.0, 2.0]])
    assert support.kept(values).sum() == 5, "no fewer than allowed"
    assert support.exactly(values).int().tolist() == [[0, 0], [1, 1], [0, 1]]


def test_zeros_are_counted_too():
    assert OfWhole(3).exactly(torch.zeros(2, 4)).sum() == 3


@pytest.mark.parametrize("share", [0.01, 0.3, 0.9])
def test_a_threshold_that_moves_is_found_as_from_scratch(share, monkeypatch):
    """A few sizes are sorted around the last threshold, or all where the new one lies elsewhere."""
    monkeypatch.setattr(supports, "SMALL", 1000)
    values = randn(50, 80)
    count = int(share * values.numel())
    support = OfWhole(count)
    for step in (0.0, 0.01, 0.01, 0.5, -0.02, 3.0, 0.01):
        values = values * (1 + step) + 0.01 * randn(50, 80, seed=1)
        kept = support.kept(values)
        assert kept.sum() == count and values.abs()[kept].min() > values.abs()[~kept].max()


def test_the_window_spares_sorting_all(monkeypatch):
    monkeypatch.setattr(supports, "SMALL", 1000)
    sorted_sizes, original = [], torch.Tensor.kthvalue
    monkeypatch.setattr(
        torch.Tensor, "kthvalue", lambda self, *args: sorted_sizes.append(len(self)) or original(self, *args)
    )
    support, values = OfWhole(2000), randn(50, 80)
    support.kept(values)
    support.kept(values * 1.001)
    assert sorted_sizes[0] == 4000 and sorted_sizes[1] < 1000


def test_so_many_of_every_row():
    support = OfRows(torch.tensor([1, 3]))
    for kept in (support.kept(VALUES), support.exactly(VALUES)):
        assert kept.int().tolist() == [[0, 1, 0, 0], [1, 0, 1, 1]]
    assert OfRows(torch.tensor([0, 4])).kept(VALUES).sum(dim=1).tolist() == [0, 4]
    assert OfRows(torch.tensor([2])).exactly(torch.ones(1, 5)).sum() == 2, "of equal ones, no more"


def test_so_many_of_every_group():
    support = OfGroups(ColumnPattern(1, 2))
    for kept in (support.kept(VALUES), support.exactly(VALUES)):
        assert kept.int().tolist() == [[0, 1, 1, 0], [1, 0, 1, 0]]
    assert OfGroups(ColumnPattern(2, 4)).exactly(torch.zeros(3, 8)).sum() == 12


def test_every_part_has_a_rule_of_its_own():
    parts = OfParts([OfWhole(1), OfRows(torch.tensor([2, 0])), OfGroups(ColumnPattern(1, 2))], [1, 2, 1])
    values = torch.cat([VALUES, VALUES.flip(0)])
    expected = torch.tensor([[0, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0], [0, 1, 1, 0]])
    for kept in (parts.kept(values), parts.exactly(values)):
        assert torch.equal(kept.int(), expected.int())


def test_exactness_holds_in_every_part():
    parts = OfParts([OfWhole(3), OfWhole(5)], [2, 2])
    kept = parts.exactly(torch.ones(4, 4))
    assert [kept[:2].sum().item(), kept[2:].sum().item()] == [3, 5]
