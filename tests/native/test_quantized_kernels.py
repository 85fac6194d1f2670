"""Kernels for quantized weights: near to float64, and all of them the same to the bit."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_checks import ROUNDING, bits, check_rows_alone, kernels, nearest
from profiles import at_night, examples

from optimum_neuronal.native.library import DTYPES
from optimum_neuronal.packed.formats.quantized import quantized_bytes


LARGEST = torch.finfo(torch.bfloat16).max
LOST = {8: 1.2e-2}  # of a product whose inputs have no outliers, by bits, as a share of its norm
BITS = (2, 3, 5, 8)


def multiply(kernel, weight, x, bias=None) -> torch.Tensor:
    return kernel.quantized_linear(x, weight.codes, weight.bits, weight.scales, weight.steps, bias)


def exact_product(weight, x, bias=None) -> torch.Tensor:
    """Return the product in float64, of x as it is."""
    y = x.double() @ weight.to(dtype=torch.float32).unpack().double().T
    return y if bias is None else y + bias.double()


@examples(25)
@given(
    rows=st.integers(1, 150),
    columns=st.integers(1, 300) | st.sampled_from([64, 128, 1024, 1100, 2200]),
    count=st.integers(1, 8),
    few=st.integers(2, 8),
    dtype=st.sampled_from(list(DTYPES)),
    with_bias=st.booleans(),
    steps=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_products_and_dense_copies(rows, columns, count, few, dtype, with_bias, steps, seed):
    weight = nearest((rows, columns), few, dtype, seed, steps)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, columns, generator=generator).to(dtype)
    bias = torch.randn(rows, generator=generator).to(dtype) if with_bias else None
    expected, dense = exact_product(weight, x, bias), weight.to(dtype=torch.float32).unpack().to(dtype)
    sizes = x.double().norm(dim=1, keepdim=True) * dense.double().norm(dim=1)
    first = None
    for kernel in kernels():
        y = multiply(kernel, weight, x, bias)
        first = y if first is None else first
        assert y.dtype == dtype and torch.equal(bits(y), bits(first)), kernel.name
        off = (y.double() - expected).abs() - 1.01 * ROUNDING[dtype] * expected.abs()
        assert (off <= LOST.get(few, 4e-3) * 2 * sizes + 1e-6).all(), kernel.name
        copied = torch.full((rows, columns), 7, dtype=dtype)
        kernel.unpack_quantized(weight.codes, few, weight.scales, weight.steps, copied)
        assert torch.equal(bits(copied), bits(dense)), kernel.name


@pytest.mark.parametrize("few", BITS)
def test_neither_threads_nor_other_rows_change_a_bit(few):
    weight = nearest((701, 1000), few)
    check_rows_alone(lambda kernel, x: multiply(kernel, weight, x), torch.randn(8, 1000))


@pytest.mark.parametrize("few", BITS)
@pytest.mark.parametrize("steps", [False, True])
def test_any_finite_input(few, steps):
    """The largest and the smallest numbers, and zeros: no row's result depends on others, none is infinite before it must."""
    weight = nearest((7, 300), few, steps=steps)
    x = torch.randn(6, 300, generator=torch.Generator().manual_seed(1)) * 1e-3
    plain = x.clone()
    x[1] = x[1].sign() * LARGEST / 2
    x[2] *= 1e-35
    x[3] *= 1e-42
    x[4] = 0
    tiny = replace(weight, scales=weight.scales * 2.0**-20)
    exact = exact_product(tiny, x)
    for kernel in kernels():
        y = multiply(kernel, tiny, x)
        assert y.isfinite().all() and not y[4].any(), kernel.name
        off = (y.double() - exact).norm(dim=1)
        sizes = x.double().norm(dim=1) * tiny.unpack().double().norm()
        assert (off <= 2e-2 * sizes + 1e-42).all(), kernel.name
        assert torch.equal(y[[0, 5]], multiply(kernel, tiny, plain)[[0, 5]]), kernel.name


@pytest.mark.parametrize("few", BITS)
def test_large_and_small_factors(few):
    """Scales and steps whose product is of a usual size, though neither is."""
    weight = nearest((7, 300), few, steps=True)
    x = torch.randn(2, 300, generator=torch.Generator().manual_seed(1))
    for power in (100, -100):
        moved = replace(weight, scales=weight.scales * 2.0**power, steps=weight.steps * 2.0**-power)
        assert torch.equal(moved.unpack(), weight.unpack())
        for kernel in kernels():
            assert torch.equal(multiply(kernel, moved, x), multiply(kernel, weight, x)), kernel.name


@pytest.mark.parametrize("special", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("few", BITS)
def test_what_is_not_finite_stays_in_its_row(few, special):
    weight, x = nearest((7, 300), few), torch.randn(3, 300)
    for kernel in kernels():
        plain, spoilt = multiply(kernel, weight, x), x.clone()
        spoilt[1, 200] = special
        y = multiply(kernel, weight, spoilt)
        assert y[1].isnan().all() and torch.equal(y[[0, 2]], plain[[0, 2]]), kernel.name


@pytest.mark.parametrize("few", BITS)
def test_scales_of_zero_give_zeros_without_a_sign(few):
    weight = nearest((3, 70), few)
    weight = replace(weight, scales=torch.tensor([0.0, 1.0, 0.0]).bfloat16())
    for kernel in kernels():
        dense = torch.full((3, 70), 7.0)
        kernel.unpack_quantized(weight.codes, few, weight.scales, None, dense)
        assert not dense[0].any() and not dense[[0, 2]].signbit().any() and dense[1].any(), kernel.name
        assert not multiply(kernel, weight, torch.ones(1, 70))[0, [0, 2]].any(), kernel.name


@at_night
@pytest.mark.parametrize("few", BITS)
def test_rows_behind_two_to_the_31_bytes(few, tmp_path):
    """The codes lie at the end of a file with a hole, as those of a weight's last rows do."""
    weight, x = nearest((64, 2**14), few), torch.randn(2, 2**14)
    far = 64 * (2**31 // quantized_bytes((64, 2**14), few) + 1)  # rows
    size = far * weight.codes.nbytes // 64
    many = torch.from_file(str(tmp_path / "codes"), shared=True, size=size + weight.codes.nbytes, dtype=torch.uint8)
    many[size:] = weight.codes.flatten().view(torch.uint8)
    scales = torch.cat([torch.zeros(far), weight.scales]).bfloat16()
    kernel = kernels()[-1]
    y = kernel.quantized_linear(x, many, few, scales, None, None)
    assert torch.equal(y[:, far:], multiply(kernel, weight, x)) and not y[:, :far].any()
