"""Kernels for values of few bits, against the same arithmetic in torch."""

from itertools import product

import pytest
import torch
from coded import coded_tensors, make_coded
from hypothesis import given
from hypothesis import strategies as st
from kernel_checks import FAR, check_product, check_rows_alone, far_behind, kernels
from profiles import examples

from optimum_neuronal.formats.codebooks import BITS
from optimum_neuronal.inference import torch_fallback
from optimum_neuronal.inference.packed_rows import DTYPES


FUZZ = examples(30)


def make_x(count, columns, dtype=torch.float32, seed=1) -> torch.Tensor:
    x = torch.randn(count, columns, generator=torch.Generator().manual_seed(seed))
    x[:, 5:7] *= 30  # as hidden states have them
    return x.to(dtype)


@FUZZ
@given(
    out=st.integers(1, 40),
    columns=st.integers(1, 300) | st.sampled_from([64, 128, 1024, 1100, 2200]),
    count=st.integers(1, 8),
    value_bits=st.sampled_from(BITS),
    dtype=st.sampled_from(DTYPES),
    density=st.sampled_from([0, 0.02, 0.3, 0.5, 1]),
    with_bias=st.booleans(),
    seed=st.integers(0, 1000),
    short=st.booleans(),
)
def test_products(out, columns, count, value_bits, dtype, density, with_bias, seed, short):
    """With floats close to float64; with bytes the same to the bit as in torch, whose sums are exact."""
    coded = make_coded(out, columns, value_bits, density, seed=seed, short=short)
    tensors, x = coded_tensors(coded), make_x(count, columns, dtype, seed)
    bias = torch.randn(out).to(dtype) if with_bias else None
    by_bytes = torch_fallback.coded_linear(x, *tensors, bias, True)
    for kernel in kernels():
        check_product(kernel.coded_linear(x, *tensors, bias, False), x, coded.unpack(), bias)
        assert torch.equal(kernel.coded_linear(x, *tensors, bias, True), by_bytes), kernel.name


def test_what_rounding_inputs_costs():
    """Of inputs without outliers: one in a hundred, since 8 bits hold 127 steps on each side."""
    for value_bits in BITS:
        coded = make_coded(64, 1500, value_bits)
        x = torch.randn(3, 1500, generator=torch.Generator().manual_seed(2))
        exact = x.double() @ coded.unpack().double().T
        for kernel in kernels():
            y = kernel.coded_linear(x, *coded_tensors(coded), None, True).double()
            assert 1e-4 < (y - exact).norm() / exact.norm() < 1.2e-2, kernel.name
            y = kernel.coded_linear(x, *coded_tensors(coded), None, False).double()
            assert (y - exact).norm() / exact.norm() < 1e-6, kernel.name


def test_neither_threads_nor_other_rows_change_a_bit():
    for value_bits, int8 in product(BITS, [False, True]):
        tensors = coded_tensors(make_coded(701, 1000, value_bits))
        check_rows_alone("coded_linear", make_x(8, 1000), *tensors, None, int8)


@FUZZ
@given(
    out=st.integers(1, 40),
    columns=st.integers(1, 200) | st.sampled_from([64, 4096, 5000]),
    value_bits=st.sampled_from(BITS),
    dtype=st.sampled_from(DTYPES),
    density=st.sampled_from([0, 0.3, 1]),
    seed=st.integers(0, 1000),
    short=st.booleans(),
)
def test_dense_copies_are_bit_equal(out, columns, value_bits, dtype, density, seed, short):
    coded = make_coded(out, columns, value_bits, density, dtype, seed, short)
    expected = coded.unpack()
    for kernel in kernels():
        dense = torch.full((out, columns), 7, dtype=dtype)
        kernel.unpack_coded(*coded_tensors(coded), dense)
        assert torch.equal(dense, expected), kernel.name


def test_what_is_not_finite_stays_in_its_row():
    for special in [float("nan"), float("inf"), -float("inf")]:
        tensors, x = coded_tensors(make_coded(7, 300, 4)), make_x(3, 300)
        plain = torch_fallback.coded_linear(x, *tensors, None, True)
        x[1, 200] = special
        for kernel in kernels():
            y = kernel.coded_linear(x, *tensors, None, True)
            assert y[1].isnan().all() and torch.equal(y[[0, 2]], plain[[0, 2]]), kernel.name
            assert kernel.coded_linear(x, *tensors, None, False)[[0, 2]].isfinite().all(), kernel.name


def test_inputs_that_are_nearly_zero():
    """Their scale would be a number without all of its bits: they are taken for zero. Halves are rounded to even."""
    tensors = coded_tensors(make_coded(7, 300, 4))
    x = torch.zeros(4, 300)
    x[0], x[1], x[2, 3] = 1e-37, 1e-45, 2e-36
    x[3, :4] = torch.tensor([127.0, 0.5, 1.5, -2.5])
    expected = torch_fallback.coded_linear(x, *tensors, None, True)
    assert not expected[:2].any()
    for kernel in kernels():
        assert torch.equal(kernel.coded_linear(x, *tensors, None, True), expected), kernel.name


@pytest.mark.parametrize("value_bits", BITS)
def test_codes_behind_two_to_the_31(value_bits, tmp_path):
    bits, codes, offsets, *rest = coded_tensors(make_coded(9, 200, value_bits))
    many, x = far_behind(codes, tmp_path), make_x(3, 200)
    for kernel in kernels():
        near = kernel.coded_linear(x, bits, codes, offsets, *rest, None, False)
        assert torch.equal(kernel.coded_linear(x, bits, many, offsets + FAR, *rest, None, False), near), kernel.name
