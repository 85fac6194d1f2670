from itertools import product

import torch

from optimum_neuronal.formats import bitmask
from optimum_neuronal.formats.packed import PackedMask, PackedWeight
from optimum_neuronal.sparsity.masks import Zeros


def test_packing_is_lossless():
    for shape in [(1, 1), (3, 5), (8, 8), (17, 33)]:
        mask = torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 0.7
        packed = PackedMask.pack(mask)
        assert torch.equal(packed.unpack(), mask)
        assert packed.bits.numel() == -(-mask.numel() // 8)


def test_packed_weights_come_back_bit_for_bit():
    for shape, dtype in product([(1, 1), (3, 7), (16, 24)], [torch.float32, torch.bfloat16]):
        weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
        weight[torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.7] = 0
        packed = PackedWeight.pack(weight)
        for found, expected in zip((packed.mask.bits, packed.values), bitmask.pack(weight), strict=True):
            assert torch.equal(found, expected), "as in files"
        assert packed.nbytes == packed.mask.bits.nbytes + packed.values.nbytes
        assert torch.equal(PackedMask.pack(weight != 0).bits, packed.mask.bits)
        assert torch.equal(packed.unpack(), weight) and torch.equal(packed.mask.unpack(), weight != 0)
        target = torch.ones(shape, dtype=dtype)
        packed.apply_to(target)
        assert torch.equal(target, weight)
        Zeros(torch.zeros(shape, dtype=torch.bool)).apply_to(target)
        assert not target.any()


def test_all_that_has_a_bit_is_kept():
    weight = torch.tensor([[-0.0, 0.0, float("nan")]])
    assert PackedWeight.pack(weight).unpack().view(torch.int32).tolist() == weight.view(torch.int32).tolist()
    assert PackedWeight.pack(weight).mask.unpack().tolist() == [[True, False, True]]
