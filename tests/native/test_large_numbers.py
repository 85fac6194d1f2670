"""Inputs near the largest number: what is finite, whatever the order of its sum, is not infinite in any kernel."""

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from kernel_checks import check_product, kernels
from profiles import examples

from optimum_neuronal.formats.int8_weight import Int8Weight
from optimum_neuronal.inference import torch_fallback
from optimum_neuronal.inference.coded_rows import CodedRows
from optimum_neuronal.inference.int8_rows import Int8Rows
from optimum_neuronal.inference.layouts import lay_out
from optimum_neuronal.inference.packing import ValueFormat, pack_rows


LARGEST = torch.finfo(torch.bfloat16).max


def lay(weight, value_bits):
    """Rows of a format: values as they are, codes, or 8 bits without a mask."""
    if value_bits == "levels":
        return lay_out(Int8Weight.rounded(weight))
    return pack_rows(weight, False, None if value_bits is None else ValueFormat(value_bits, "int8"))


def products(rows, x):
    """What each kernel, and torch, make of rows and x as it is."""
    tensors = [getattr(rows, name) for name in rows.names if name != "like"]
    name = {CodedRows: "coded_linear", Int8Rows: "int8_linear"}.get(type(rows))
    for kernel in kernels():
        if name is None:
            yield kernel.name, kernel.linear(x, *tensors, None)
        else:
            yield kernel.name, getattr(kernel, name)(x, *tensors, None, False)
    if name is None:
        yield "torch", torch_fallback.packed_linear(x, *tensors, None)
    else:
        yield "torch", getattr(torch_fallback, name)(x, *tensors, None, False)


@examples(12)
@given(
    share=st.sampled_from([0.5, 1, 1e-3, 1e-5]),
    columns=st.sampled_from([1, 63, 128, 300, 1100]),
    count=st.integers(1, 8),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    seed=st.integers(0, 100),
)
@example(share=0.5, columns=300, count=3, dtype=torch.bfloat16, seed=0)
@pytest.mark.parametrize("value_bits", [None, 2, 3, 4, 8, "levels"])
def test_finite_products_stay_finite(value_bits, share, columns, count, dtype, seed):
    """Of both signs, in the first row of x alone; other rows and small numbers beside large ones stay as exact."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(7, columns, generator=generator) * (0.1 / columns)
    weight[torch.rand(7, columns, generator=generator) < 0.5] = 0
    x = torch.randn(count, columns, generator=generator)
    x[0] = x[0].sign() * share * LARGEST
    rows, x = lay(weight.to(dtype), value_bits), x.to(dtype)
    exact = rows if value_bits is None else replace(rows, rounded=None).converted(None, torch.float32)
    exact = exact.unpack()  # kernels multiply with levels and scales, whose products are not rounded
    for kernel, y in products(rows, x):
        assert y.isfinite().all(), kernel
        check_product(y, x, exact, None)


@pytest.mark.parametrize("value_bits", [4, "levels"])
def test_rounded_inputs(value_bits):
    """Rounded to 8 bits, in kernels the same to the bit as in torch."""
    generator = torch.Generator().manual_seed(0)
    rows = lay(torch.randn(7, 300, generator=generator) * 1e-3, value_bits)
    x = torch.randn(3, 300, generator=generator).sign() * LARGEST / 2
    tensors = [getattr(rows, name) for name in rows.names if name != "like"]
    name = "int8_linear" if value_bits == "levels" else "coded_linear"
    expected = getattr(torch_fallback, name)(x, *tensors, None, True)
    assert expected.isfinite().all()
    for kernel in kernels():
        assert torch.equal(getattr(kernel, name)(x, *tensors, None, True), expected), kernel.name
