"""Weights in every packed format, and how far products are off."""

import torch

from optimum_neuronal.packed.formats.packed_matrix import PackedMatrix
from optimum_neuronal.packed.formats.quantized import QuantizedWeight
from optimum_neuronal.packed.formats.sparse import INTEGERS, SparseWeight


TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 1e-3, torch.float32: 1e-5}


def sparse(shape, dtype=torch.float32, density=0.3, seed=0) -> torch.Tensor:
    """Return a weight of any bits, zero but for a share of its elements: NaN, infinity, subnormal numbers and -0.0 among them."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), generator=generator, dtype=torch.uint8)
    weight = raw.view(-1).view(dtype).view(shape)
    weight.view(INTEGERS[dtype.itemsize])[torch.rand(shape, generator=generator) >= density] = 0
    if weight.numel():
        weight.view(-1)[0] = -0.0
    return weight


def bits(weight):
    return weight.view(INTEGERS[weight.element_size()])


def finite(shape, dtype, density=0.3, seed=0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator)
    return weight.masked_fill_(torch.rand(shape, generator=generator) >= density, 0).to(dtype)


def quantized(out, columns, bits=3, dtype=torch.float32, steps=False, seed=0) -> QuantizedWeight:
    """Return a weight of random codes; one of its scales is 0."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, (out, columns), generator=generator)
    codes = (codes - 128).clamp(min=-127).to(torch.int8) if bits == 8 else codes.to(torch.uint8)
    scales = torch.rand(out, generator=generator).bfloat16() / 2**bits
    scales[1:2] = 0
    found = (torch.rand(columns, generator=generator) + 0.5).bfloat16() if steps else None
    return QuantizedWeight.encode(codes, bits, scales, found, dtype)


def all_matrices(out, columns, dtype=torch.float32) -> list[PackedMatrix]:
    """Return a matrix of every format, quantized ones with and without steps."""
    return [
        SparseWeight.pack(finite((out, columns), dtype)),
        *(
            quantized(out, columns, bits, dtype, steps)
            for bits, steps in ((2, True), (3, False), (8, False), (8, True))
        ),
    ]


def error(y, x, weight, bias=None) -> float:
    """Return the largest error relative to the largest magnitude that float64 gives."""
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    return float((y.detach().double() - exact.detach()).abs().max() / exact.abs().max().clamp(min=1e-30))
