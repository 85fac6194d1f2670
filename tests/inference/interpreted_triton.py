"""Tests that run under TRITON_INTERPRET=1: test_triton_kernels.py starts them in a process of their own.

The interpreter starts programs one after the other in numpy, so weights are tiny.
"""

from itertools import product

import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_checks import FAR, far_behind
from profiles import by_day, examples
from weights import TOLERANCE, bits, error, finite, packed, sparse

from optimum_neuronal.inference import accelerator, torch_fallback, triton_kernels
from optimum_neuronal.inference.packed_rows import DTYPES


FUZZ = examples(10)
SPAN = 32 * triton_kernels.WORDS  # elements of a row that a program looks at together


def check(x, weight, bias=None):
    """As float64 computes it, and as torch does but for float32's rounding; then one rounding to the dtype."""
    y, parts = triton_kernels.packed_linear(x, *packed(weight), bias), packed(weight)
    assert y.dtype == x.dtype and y.shape == (*x.shape[:-1], len(weight)) and y.is_contiguous()
    if y.numel():
        fallback = torch_fallback.packed_linear(x, *parts, bias)
        assert error(y, x, weight, bias) < TOLERANCE[x.dtype]
        assert (y - fallback).abs().max() <= TOLERANCE[x.dtype] * fallback.abs().max()


def test_few_rows_of_x():
    for dtype, count in product(
        DTYPES, by_day(range(1, triton_kernels.MAX_FUSED_ROWS + 1), 1, 5, triton_kernels.MAX_FUSED_ROWS)
    ):
        check(finite((count, 133), dtype, 1, 2), finite((5, 133), dtype), finite((5,), dtype, 1))


def test_shapes_of_x():
    for lead in [(), (0,), (2, 3), (9,), (2, 20)]:
        check(
            finite((*lead, 70), torch.bfloat16, 1, 2), finite((6, 70), torch.bfloat16), finite((6,), torch.bfloat16, 1)
        )


def test_columns():
    for columns in by_day(
        [1, 31, 32, 63, 64, 65, SPAN - 1, SPAN, SPAN + 1, 2 * SPAN + 40], 1, 32, 65, SPAN, 2 * SPAN + 40
    ):
        weight = sparse((3, columns), torch.float16)
        assert torch.equal(bits(triton_kernels.unpack_rows(*packed(weight), columns)), bits(weight))
        check(finite((2, columns), torch.float32, 1, 2), finite((3, columns), torch.float32, seed=1))


def test_empty_and_full_rows():
    for dtype in DTYPES:
        weight = finite((9, 130), dtype, 1)
        weight[[0, 3, 4, 8]] = 0
        check(finite((3, 130), dtype, 1, 2), weight)
        assert torch.equal(triton_kernels.unpack_rows(*packed(weight), 130), weight)


def test_nothing_is_kept():
    for shape in [(0, 64), (4, 0), (0, 0), (4, 64)]:
        weight, x = torch.zeros(shape), torch.ones(2, shape[1])
        bias = torch.arange(shape[0]).float()
        assert torch.equal(triton_kernels.packed_linear(x, *packed(weight), bias), bias.expand(2, -1))
        assert torch.equal(triton_kernels.unpack_rows(*packed(weight), shape[1]), weight)


@FUZZ
@given(
    out=st.integers(0, 9),
    columns=st.integers(0, 200) | st.sampled_from([64, 128]),
    count=st.integers(0, 10),
    dtype=st.sampled_from(DTYPES),
    density=st.sampled_from([0, 0.3, 1]),
    seed=st.integers(0, 1000),
)
def test_any_weight(out, columns, count, dtype, density, seed):
    weight = sparse((out, columns), dtype, density, seed)
    assert torch.equal(bits(triton_kernels.unpack_rows(*packed(weight), columns)), bits(weight))
    check(finite((count, columns), dtype, 1, seed), finite((out, columns), dtype, density, seed))


def test_infinite_and_undefined_numbers():
    """As in a dense weight: what is not finite reaches a sum also where it meets a zero, and no other sum."""
    weight = torch.zeros(4, 70)
    weight[0, 3], weight[1, 5], weight[2, 66] = torch.inf, torch.nan, 2
    for place, value in ((66, 1.0), (66, torch.inf), (1, torch.nan)):
        x = torch.zeros(2, 70)
        x[0, place], x[1, 3] = value, 1
        expected = torch.nn.functional.linear(x, weight)
        assert torch.equal(
            bits(triton_kernels.packed_linear(x, *packed(weight), None).isnan()), bits(expected.isnan())
        )
        assert torch.equal(triton_kernels.packed_linear(x, *packed(weight), None).nan_to_num(), expected.nan_to_num())


def test_more_rows_go_by_blocks(monkeypatch):
    monkeypatch.setattr(triton_kernels, "SCRATCH", 8 * 70)
    check(finite((20, 70), torch.bfloat16, 1, 2), finite((21, 70), torch.bfloat16), finite((21,), torch.bfloat16, 1))


def test_rows_of_a_larger_weight():
    """Bits and offsets of some rows beside all values: the offsets do not begin at 0."""
    weight, x = finite((12, 70), torch.float32), finite((2, 70), torch.float32, 1, 2)
    bits_, values, offsets = packed(weight)
    part = bits_[5:9], values, offsets[5:10]
    assert offsets[5] > 0 and torch.equal(triton_kernels.unpack_rows(*part, 70), weight[5:9])
    y = triton_kernels.packed_linear(x, *part, None)
    assert error(y, x, weight[5:9]) < TOLERANCE[torch.float32]
    many = finite((triton_kernels.MAX_FUSED_ROWS + 1, 70), torch.float32, 1, 2)
    assert error(triton_kernels.packed_linear(many, *part, None), many, weight[5:9]) < TOLERANCE[torch.float32]


def test_bits_that_lie_askew():
    weight = finite((5, 70), torch.float32)
    parts = packed(weight)
    askew = torch.empty(parts[0].numel() + 1, dtype=torch.uint8)[1:].view(parts[0].shape).copy_(parts[0])
    assert askew.data_ptr() % 4
    assert torch.equal(triton_kernels.unpack_rows(askew, *parts[1:], 70), weight)


def test_values_behind_two_to_the_31(tmp_path):
    weight = finite((4, 70), torch.bfloat16)
    mask, values, offsets = packed(weight)
    many = far_behind(values, tmp_path)
    assert torch.equal(triton_kernels.unpack_rows(mask, many, offsets + FAR, 70), weight)
    x = finite((3, 70), torch.bfloat16, 1, 2)
    near = triton_kernels.packed_linear(x, mask, values, offsets, None)
    assert torch.equal(triton_kernels.packed_linear(x, mask, many, offsets + FAR, None), near)


def test_the_same_sums_every_time():
    x, parts = finite((2, 700), torch.float32, 1, 2), packed(finite((3, 700), torch.float32))
    first, second = (triton_kernels.packed_linear(x, *parts, None) for _ in range(2))
    assert torch.equal(bits(first), bits(second))


def test_chosen_where_it_works(monkeypatch):
    monkeypatch.setattr(accelerator, "TRITON_DEVICES", ("cpu",))
    accelerator.kernels.cache_clear()
    assert accelerator.kernels(torch.device("cpu")) is triton_kernels
    accelerator.kernels.cache_clear()
