import pytest
import torch

from optimum_neuronal.formats.packed import PackedMask, PackedWeight
from optimum_neuronal.sparsity.changes import NewWeight, Zeros


CHANGES = {
    "zeros": lambda mask, new: Zeros(mask),
    "packed mask": lambda mask, new: PackedMask.pack(~mask),
    "new weight": lambda mask, new: NewWeight(new),
    "packed weight": lambda mask, new: PackedWeight.pack(new),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_change_is_applied_in_place_or_to_a_copy(kind):
    generator = torch.Generator().manual_seed(0)
    weight, mask = torch.randn(5, 9, generator=generator), torch.rand(5, 9, generator=generator) < 0.6
    new = torch.randn(5, 9, generator=generator).masked_fill(mask, 0)
    expected = weight.masked_fill(mask, 0) if kind in ("zeros", "packed mask") else new
    change, before = CHANGES[kind](mask, new), weight.clone()
    assert torch.equal(change.applied(weight), expected) and torch.equal(weight, before)
    stored = weight.T.contiguous()  # as Conv1D keeps it: the change is of the view
    change.apply_to(stored.T)
    assert torch.equal(stored.T, expected)
    change.apply_to(weight)
    assert torch.equal(weight, expected)
