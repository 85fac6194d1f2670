import pytest
import torch
from by_hand import make_experts

from optimum_neuronal.model.change import NewWeight, PackedChange, PackedMask, Zeros
from optimum_neuronal.model.projections import trial_tensors


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (8, 8), (17, 33), (2, 3, 7)])
def test_a_packed_mask_comes_back(shape):
    """A bit for each element, from the lowest bit of a byte on; bits after the end are 0."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 0.7
    packed = PackedMask.pack(mask)
    assert torch.equal(packed.unpack(), mask) and packed.bits.dtype == torch.uint8
    by_hand = [sum(int(kept) << place for place, kept in enumerate(eight)) for eight in mask.flatten().split(8)]
    assert packed.bits.tolist() == by_hand


MASK = torch.tensor([[True, False, True], [True, True, False]])
WEIGHT = torch.tensor([[1.0, 2.0, -3.0], [-0.0, 5.0, 6.0]])
UPDATED = torch.tensor([[1.5, 0.0, -0.0], [-4.0, 0.0, 1e-40]])  # with a negative zero and a subnormal number


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("change", [Zeros(MASK), NewWeight(UPDATED)], ids=["zeros", "new weight"])
def test_a_packed_change_comes_back_from_a_record(change, dtype):
    """A new weight's negative zeros become zeros. A mask keeps them."""
    weight = WEIGHT.to(dtype)
    change = NewWeight(change.weight.to(dtype)) if isinstance(change, NewWeight) else change
    tensors = PackedChange.pack(change, weight).tensors("layer.up")
    assert set(tensors) == {"layer.up.mask"} | ({"layer.up.values"} if isinstance(change, NewWeight) else set())
    changed = PackedChange.of_tensors(tensors, "layer.up", weight.shape).applied(weight)
    assert changed.dtype == dtype and torch.equal(changed, change.applied(weight))
    negative_zeros = (changed == 0) & changed.signbit()
    assert negative_zeros.any() == isinstance(change, Zeros)
    assert torch.equal(weight, WEIGHT.to(dtype)), "the given weight stays"
    change_in_place = weight.clone()
    change.apply_to(change_in_place)
    assert torch.equal(change_in_place, change.applied(weight))


@pytest.mark.parametrize("transposed", [False, True])
def test_packed_changes_of_experts(transposed):
    first, second, third = make_experts(3, transposed=transposed).pruned
    updated = torch.arange(8.0).view(first.shape)
    changes = {first.name: Zeros(updated.bool()), second.name: NewWeight(updated)}
    packed = {p.name: PackedChange.pack(changes[p.name], p.weight) for p in (first, second)}
    (tensor,) = trial_tensors([first, second], lambda p: packed[p.name]).values()
    assert torch.equal(first.view(tensor), updated.bool().float()) and torch.equal(second.view(tensor), updated)
    assert torch.equal(third.view(tensor), torch.ones(third.shape))
