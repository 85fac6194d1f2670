"""Weights of few bits against cases by hand, plain rounding and the best of all codes."""

import itertools
from typing import NamedTuple

import pytest
import torch
from random_layers import hessian_of, inputs, weights

from optimum_neuronal.packed.formats.quantized import QuantizedWeight
from optimum_neuronal.saliency.low_bit import Quantizer


class Quantized(NamedTuple):
    codes: torch.Tensor
    scales: torch.Tensor
    steps: torch.Tensor | None = None


def quantize(weight, hessian, bits, steps=False):
    return Quantized(*Quantizer(hessian).quantize(weight, bits, steps))


def values(found: Quantized, bits: int) -> torch.Tensor:
    return QuantizedWeight.encode(found.codes, bits, found.scales, found.steps, torch.float32).unpack()


BITS = (2, 3, 4, 7)


def loss(weight: torch.Tensor, found: Quantized, bits: int, hessian: torch.Tensor) -> torch.Tensor:
    """Squared error of the outputs of each row."""
    lost = (weight - values(found, bits)).double()
    return ((lost @ hessian.double()) * lost).sum(dim=1)


def rounded(weight: torch.Tensor, bits: int) -> Quantized:
    """Each value at its nearest level, where the largest magnitude of the row is the largest level."""
    top = 2**bits - 1
    scales = (weight.abs().amax(dim=1) / top).bfloat16()
    codes = ((weight / scales.float()[:, None] + top) / 2).round().clamp(0, top)
    return Quantized(codes.to(torch.uint8), scales)


@pytest.mark.parametrize("bits", [2, 3])
def test_levels_by_hand(bits):
    """What lies on few levels is found as it stands."""
    top = 2**bits - 1
    codes = torch.randint(0, top + 1, (24, 40), generator=torch.Generator().manual_seed(0))
    weight = 0.125 * torch.arange(1, 25)[:, None] * (2 * codes - top).float()
    found = quantize(weight, hessian_of(40) + 1e5 * torch.eye(40), bits)
    assert torch.equal(found.codes, codes.to(torch.uint8))
    assert torch.equal(values(found, bits), weight)


@pytest.mark.parametrize("bits", BITS)
def test_inputs_without_correlation_give_the_nearest_levels(bits):
    weight, hessian = weights(16, 30), torch.diag(torch.linspace(0.1, 5, 30))
    found = quantize(weight, hessian, bits)
    levels = torch.arange(1 - 2**bits, 2**bits, 2) * found.scales.float()[:, None, None]
    nearest = (weight[:, :, None] - levels).abs().amin(dim=2)
    torch.testing.assert_close((weight - values(found, bits)).abs(), nearest, atol=1e-5, rtol=0)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("steps", [False, True])
def test_the_error_is_far_below_that_of_plain_rounding(bits, steps):
    weight, hessian = weights(32, 150), hessian_of(150)
    found = quantize(weight, hessian, bits, steps)
    assert bool((loss(weight, found, bits, hessian) < 0.7 * loss(weight, rounded(weight, bits), bits, hessian)).all())
    assert found.codes.shape == (32, 150) and found.codes.dtype == torch.uint8 and int(found.codes.max()) < 2**bits
    assert found.scales.shape == (32,) and found.scales.dtype == torch.bfloat16 and bool((found.scales > 0).all())
    if steps:
        assert found.steps.shape == (150,) and found.steps.dtype == torch.bfloat16 and bool((found.steps > 0).all())
    else:
        assert found.steps is None


def test_codes_are_near_the_best_of_all():
    """Every one of 4**6 rows of codes is tried, each with its best scale."""
    weight, hessian = weights(8, 6), hessian_of(6)
    levels = torch.tensor(list(itertools.product((-3.0, -1.0, 1.0, 3.0), repeat=6))).double()
    gain, curvature = weight.double() @ hessian.double() @ levels.T, ((levels @ hessian.double()) * levels).sum(1)
    best = ((weight.double() @ hessian.double()) * weight).sum(1) - (gain.clamp(min=0).square() / curvature).amax(1)
    assert float(loss(weight, quantize(weight, hessian, 2), 2, hessian).sum()) < 1.3 * float(best.sum())


def test_8_bits_are_the_nearest_of_255_levels():
    weight = torch.tensor([[1.0, -127.0, 63.4], [0.0, 0.0, 0.0]])
    found = quantize(weight, torch.eye(3), 8)
    assert found.codes.tolist() == [[1, -127, 63], [0, 0, 0]] and found.codes.dtype == torch.int8
    assert values(found, 8)[1].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("bits", [*BITS, 8])
@pytest.mark.parametrize("steps", [False, True])
def test_rows_of_zeros_and_inputs_that_are_always_zero(bits, steps):
    weight, x = weights(6, 20), inputs(20, 100)
    weight[2] = 0
    x[:, 5:8] = 0
    found = quantize(weight, x.T @ x, bits, steps)
    dense = values(found, bits)
    assert bool(torch.isfinite(dense).all()) and dense[2].tolist() == [0.0] * 20
    if steps and bits < 8:
        assert bool((found.steps > 0).all())
    assert bool(torch.isfinite(values(quantize(weight, torch.zeros(20, 20), bits, steps), bits)).all())


def test_several_paths_lose_less_than_one():
    weight, hessian = weights(32, 150), hessian_of(150)
    quick, whole = (Quantized(*Quantizer(hessian, quick=quick).quantize(weight, 2)) for quick in (True, False))
    assert float(loss(weight, whole, 2, hessian).sum()) < 0.98 * float(loss(weight, quick, 2, hessian).sum())
