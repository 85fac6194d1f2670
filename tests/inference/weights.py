"""Weights in every layout that kernels compute with, and how far products are off."""

import torch
from coded import make_coded

from optimum_neuronal.formats.bitmask import INTEGERS
from optimum_neuronal.formats.int8_weight import Int8Weight
from optimum_neuronal.formats.packed import PackedWeight
from optimum_neuronal.inference.coded_rows import ACTIVATIONS, CodedRows
from optimum_neuronal.inference.int8_rows import Int8Rows
from optimum_neuronal.inference.packed_rows import PackedRows


TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 1e-3, torch.float32: 1e-5}


def sparse(shape, dtype=torch.float32, density=0.3, seed=0) -> torch.Tensor:
    """A weight of any bits, zero but for a share of its elements: NaN, infinity, subnormal numbers and -0.0 among them."""
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


def packed(weight) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = PackedRows.of(PackedWeight.pack(weight))
    return rows.bits, rows.values, rows.offsets


def make_int8(out, columns, dtype=torch.float32, seed=0) -> Int8Weight:
    weight = torch.randn(out, columns, generator=torch.Generator().manual_seed(seed))
    weight[1::5] = 0
    return Int8Weight.nearest(weight.to(dtype))


def all_rows(out, columns, dtype=torch.float32, value_bits=4) -> list:
    """Return rows of every layout: of values, then of codes and of levels for either kind of activations."""
    codes, levels = make_coded(out, columns, value_bits, dtype=dtype), make_int8(out, columns, dtype)
    values = PackedWeight.pack(finite((out, columns), dtype))
    return [
        PackedRows.of(values),
        *(CodedRows.of(codes, activations) for activations in ACTIVATIONS),
        *(Int8Rows.of(levels, activations) for activations in ACTIVATIONS),
    ]


def error(y, x, weight, bias=None) -> float:
    """Largest error relative to the largest magnitude that float64 gives."""
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    return float((y.double() - exact).abs().max() / exact.abs().max().clamp(min=1e-30))
