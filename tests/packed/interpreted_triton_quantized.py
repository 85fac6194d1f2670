"""Tests that run under TRITON_INTERPRET=1: test_triton_kernels.py starts them in a process of their own."""

from itertools import product

import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_checks import nearest
from profiles import by_day, examples

from optimum_neuronal.native.library import DTYPES
from optimum_neuronal.packed import accelerator, triton_quantized


accelerator.TRITON_DEVICES = ("cpu",)
SPAN = triton_quantized.COLUMNS
TOLERANCE = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 1e-5}


def check(weight, x, bias=None):
    """As float64 computes it, but for float32's sums and one rounding."""
    y = accelerator.linear(weight, x, bias)
    assert y.dtype == x.dtype and y.shape == (len(x), weight.shape[0])
    exact = x.double() @ weight.to(dtype=torch.float32).unpack().double().T + (0 if bias is None else bias.double())
    sizes = x.double().abs() @ weight.unpack().double().abs().T + 1
    assert not y.numel() or ((y.double() - exact).abs() <= TOLERANCE[x.dtype] * sizes).all()


def check_dense(weight):
    """The interpreter cuts the last bits of a bfloat16 off, where compiled kernels round."""
    found = accelerator.unpack(weight)
    assert found.dtype == weight.dtype and found.shape == weight.shape
    rtol = 2**-7 if weight.dtype == torch.bfloat16 else 0
    assert torch.allclose(found.float(), weight.unpack().float(), rtol=rtol, atol=0)


def test_columns():
    cases = list(product(range(2, 9), [1, 65, SPAN + 30], (True, False)))
    for bits, columns, steps in by_day(cases, *cases[::4]):
        weight = nearest((70, columns), bits, steps=steps)
        check_dense(weight)
        check(weight, torch.randn(2, columns))


@examples(4)
@given(
    rows=st.integers(1, 140),
    columns=st.integers(1, 200) | st.sampled_from([64, 128]),
    count=st.integers(0, 10),
    bits=st.integers(2, 8),
    dtype=st.sampled_from(list(DTYPES)),
    with_bias=st.booleans(),
    steps=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_weight(rows, columns, count, bits, dtype, with_bias, steps, seed):
    weight = nearest((rows, columns), bits, dtype, seed, steps)
    check_dense(weight)
    check(weight, torch.randn(count, columns).to(dtype), torch.randn(rows).to(dtype) if with_bias else None)


def test_more_rows_go_by_blocks(monkeypatch):
    """Blocks of 64 rows, the last one shorter."""
    monkeypatch.setattr(accelerator, "SCRATCH", 64)
    for bits in (3, 8):
        check(nearest((150, 70), bits), torch.randn(20, 70), torch.randn(150))


def test_rows_of_a_larger_weight():
    for bits in (3, 8):
        weight = nearest((200, 70), bits)
        part = weight.rows(64, 128)
        assert part.codes.data_ptr() > weight.codes.data_ptr()
        assert torch.equal(accelerator.unpack(part), weight.unpack()[64:128])
