"""Tests that run under TRITON_INTERPRET=1: test_triton_kernels.py starts them in a process of their own."""

from itertools import product

import torch
from coded import coded_tensors, make_coded
from hypothesis import given
from hypothesis import strategies as st
from profiles import by_day, examples
from weights import TOLERANCE

from optimum_neuronal.formats.codebooks import BITS
from optimum_neuronal.inference import accelerator, torch_fallback, triton_coded
from optimum_neuronal.inference.packed_rows import DTYPES


SPAN = 64 * triton_coded.WORDS


def check(coded, x, bias=None, int8=False):
    """As torch does, but for the order of sums; few rows of x fused, more by blocks."""
    tensors = coded_tensors(coded)
    y = triton_coded.coded_linear(x, *tensors, bias, int8)
    assert y.dtype == x.dtype and y.shape == (*x.shape[:-1], coded.shape[0]) and y.is_contiguous()
    if y.numel():
        fused = int8 and x.shape[:-1].numel() <= triton_coded.MAX_FUSED_ROWS
        expected = torch_fallback.coded_linear(x, *tensors, bias, fused)
        assert (y - expected).abs().max() <= TOLERANCE[x.dtype] * expected.abs().max().clamp(min=1e-30)


def check_dense(coded):
    """The interpreter cuts the last bits of a bfloat16 off, where compiled kernels round."""
    found = triton_coded.unpack_coded(*coded_tensors(coded), coded.shape[1], coded.dtype)
    assert found.dtype == coded.dtype
    assert torch.allclose(found, coded.unpack(), rtol=2**-7 if coded.dtype == torch.bfloat16 else 0, atol=0)


def test_columns():
    cases = list(product(BITS, [1, 65, SPAN + 130], (True, False)))
    for value_bits, columns, short in by_day(
        cases, *cases[::3]
    ):  # of all bits and columns, with either kind of scales
        coded = make_coded(3, columns, value_bits, short=short)
        check_dense(coded)
        check(coded, torch.randn(2, columns))


@examples(4)
@given(
    out=st.integers(0, 9),
    columns=st.integers(0, 200) | st.sampled_from([64, 128]),
    count=st.integers(0, 10),
    value_bits=st.sampled_from(BITS),
    dtype=st.sampled_from(DTYPES),
    density=st.sampled_from([0, 0.3, 1]),
    int8=st.booleans(),
    with_bias=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_weight(out, columns, count, value_bits, dtype, density, int8, with_bias, seed):
    coded = make_coded(out, columns, value_bits, density, dtype, seed, short=seed % 2 == 0)
    check_dense(coded)
    bias = torch.randn(out).to(dtype) if with_bias else None
    check(coded, torch.randn(count, columns).to(dtype), bias, int8)


def test_rows_of_a_larger_weight():
    coded = make_coded(12, 200, 3)
    bits, codes, offsets, scales, table = coded_tensors(coded)
    part = bits[5:9], codes, offsets[5:10], scales[5:9], table
    assert offsets[5] > 0 and torch.equal(triton_coded.unpack_coded(*part, 200, torch.float32), coded.unpack()[5:9])


def test_chosen_where_it_works(monkeypatch):
    monkeypatch.setattr(accelerator, "TRITON_DEVICES", ("cpu",))
    accelerator.kernels.cache_clear()
    assert accelerator.coded_kernels(torch.device("cpu")) is triton_coded
    accelerator.kernels.cache_clear()
