"""Tests that run under TRITON_INTERPRET=1: test_triton_kernels.py starts them in a process of their own.

The interpreter starts programs one after the other in numpy, so weights are tiny.
"""

from dataclasses import replace
from itertools import product

import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_checks import FAR, any_bits, bits, check_product, far_behind, finite
from profiles import by_day, examples

from optimum_neuronal.packed import accelerator, triton_kernels
from optimum_neuronal.packed.packed_weight import DTYPES, PackedWeight


accelerator.TRITON_DEVICES = ("cpu",)
SPAN = 32 * triton_kernels.WORDS  # elements of a row that a program looks at together


def check(x, weight, bias=None):
    """The interpreter cuts the last bits of a bfloat16 off, where compiled kernels round."""
    y = accelerator.linear(PackedWeight.pack(weight), x, bias)
    assert y.is_contiguous()
    check_product(y, x, weight, bias, roundings=2)


def unpack(weight) -> torch.Tensor:
    return accelerator.unpack(PackedWeight.pack(weight))


def test_few_rows_of_x():
    for dtype, count in product(
        DTYPES, by_day(range(1, accelerator.MAX_FUSED_ROWS + 1), 1, 5, accelerator.MAX_FUSED_ROWS)
    ):
        check(finite((count, 133), dtype, 1, 2), finite((5, 133), dtype), finite((5,), dtype, 1))


def test_columns():
    for columns in by_day(
        [1, 31, 32, 63, 64, 65, SPAN - 1, SPAN, SPAN + 1, 2 * SPAN + 40], 1, 32, 65, SPAN, 2 * SPAN + 40
    ):
        weight = any_bits((3, columns), torch.float16)
        assert torch.equal(bits(unpack(weight)), bits(weight))
        check(finite((2, columns), torch.float32, 1, 2), finite((3, columns), torch.float32, seed=1))


def test_nothing_is_kept():
    for shape in [(0, 64), (4, 0), (0, 0), (4, 64)]:
        weight, x = torch.zeros(shape), torch.ones(2, shape[1])
        bias = torch.arange(shape[0]).float()
        assert torch.equal(accelerator.linear(PackedWeight.pack(weight), x, bias), bias.expand(2, -1))
        assert torch.equal(unpack(weight), weight)


@examples(10)
@given(
    out=st.integers(0, 9),
    columns=st.integers(0, 200) | st.sampled_from([64, 128]),
    count=st.integers(0, 10),
    dtype=st.sampled_from(DTYPES),
    density=st.sampled_from([0, 0.3, 1]),
    seed=st.integers(0, 1000),
)
def test_any_weight(out, columns, count, dtype, density, seed):
    weight = any_bits((out, columns), dtype, density, seed)
    assert torch.equal(bits(unpack(weight)), bits(weight))
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
            bits(accelerator.linear(PackedWeight.pack(weight), x, None).isnan()), bits(expected.isnan())
        )
        assert torch.equal(accelerator.linear(PackedWeight.pack(weight), x, None).nan_to_num(), expected.nan_to_num())


def test_more_rows_go_by_blocks(monkeypatch):
    monkeypatch.setattr(accelerator, "SCRATCH", 8)
    check(finite((20, 70), torch.bfloat16, 1, 2), finite((21, 70), torch.bfloat16), finite((21,), torch.bfloat16, 1))


def test_rows_of_a_larger_weight():
    """Bits and offsets of some rows beside all values: the offsets do not begin at 0."""
    weight, x = finite((12, 70), torch.float32), finite((2, 70), torch.float32, 1, 2)
    part = PackedWeight.pack(weight).window(5, 9)
    assert part.offsets[0] > 0 and torch.equal(accelerator.unpack(part), weight[5:9])
    for inputs in (x, finite((accelerator.MAX_FUSED_ROWS + 1, 70), torch.float32, 1, 2)):
        check_product(accelerator.linear(part, inputs, None), inputs, weight[5:9])


def test_bits_that_lie_askew():
    weight = finite((5, 70), torch.float32)
    packed = PackedWeight.pack(weight)
    askew = torch.empty(packed.mask.numel() + 1, dtype=torch.uint8)[1:].view(packed.mask.shape).copy_(packed.mask)
    assert askew.data_ptr() % 4 and torch.equal(accelerator.unpack(replace(packed, mask=askew)), weight)


def test_values_behind_two_to_the_31(tmp_path):
    weight, x = finite((4, 70), torch.bfloat16), finite((3, 70), torch.bfloat16, 1, 2)
    near = PackedWeight.pack(weight)
    far = replace(near, values=far_behind(near.values, tmp_path), offsets=near.offsets + FAR)
    assert torch.equal(accelerator.unpack(far), weight)
    assert torch.equal(accelerator.linear(far, x, None), accelerator.linear(near, x, None))
