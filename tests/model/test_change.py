import pytest
import torch

from optimum_neuronal.model.change import PackedMask


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (8, 8), (17, 33), (2, 3, 7)])
def test_packing_is_lossless(shape):
    """A bit for each element, from the lowest bit of a byte on; bits behind the end are 0."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 0.7
    packed = PackedMask.pack(mask)
    assert torch.equal(packed.unpack(), mask) and packed.bits.dtype == torch.uint8
    by_hand = [sum(int(kept) << place for place, kept in enumerate(eight)) for eight in mask.flatten().split(8)]
    assert packed.bits.tolist() == by_hand
