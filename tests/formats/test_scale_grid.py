"""Short scales: their codes, and which weights have them."""

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

from optimum_neuronal.formats.code_checks import CODED_DTYPES
from optimum_neuronal.formats.codebooks import BITS, TABLES, magnitudes
from optimum_neuronal.formats.coded import CodedWeight
from optimum_neuronal.formats.scale_grid import ScaleGrid, narrow, scale_range, widen


CODES = torch.arange(256, dtype=torch.uint8)
LEVELS = magnitudes(TABLES[3][0])


def test_known_codes():
    """docs/format.md: 16 steps to a factor of 2, from just above 2**-20."""
    scales = widen(CODES).double()
    assert scales[0] == 0 and scales[1] == 2**-20 * 17 / 16 and scales[16] == 2**-19
    assert scales[240] == 2**-5 and scales[255] == 2**-5 * 31 / 16
    assert (scales.diff() > 0).all() and (scales[2:] / scales[1:-1]).max() <= 17 / 16


def test_codes_come_back():
    assert torch.equal(narrow(widen(CODES)), CODES) and narrow(widen(CODES)).dtype == torch.uint8
    assert narrow(torch.zeros(0, 3, dtype=torch.bfloat16)).shape == (0, 3)


def test_what_is_not_short_has_no_code():
    for scale in (2.0**-20, 2.0**-4, 0.0101, -0.0, -(2.0**-5), float("inf"), float("nan")):
        assert narrow(torch.tensor([2.0**-5, scale]).bfloat16()) is None, scale


@examples(25)
@given(exponent=st.floats(-30, 10), short=st.booleans())
def test_the_nearest(exponent, short):
    grid, wanted = ScaleGrid(2.0**-10, 2.0**-5, short), torch.tensor([2.0**exponent])
    known = widen(CODES) if short else torch.arange(2**15, dtype=torch.int16).view(torch.bfloat16)
    known = known.double()[(known >= grid.low) & (known <= grid.high)]
    found = grid.nearest(wanted)
    assert found.dtype == torch.bfloat16
    assert (found.double() - wanted).abs() == (known - wanted.double()).abs().min()


def test_short_scales_are_scales_of_the_dtype():
    for dtype, bits in product(CODED_DTYPES, BITS):
        levels = magnitudes(TABLES[bits][0])
        low, high = scale_range(dtype, levels)
        grid = ScaleGrid(low, high, short=False).narrowed()
        assert grid.short and low <= grid.low < 2**-15 and 0.05 < grid.high <= high
        assert narrow(torch.tensor([grid.low, grid.high]).bfloat16()) is not None


def test_which_weights_have_them():
    for largest, short in (
        ([0.02, 0.0], True),
        ([5.0, 0.01], True),
        ([0.02, 20.0], False),
        ([0.02, 1e-4], False),
        ([7.0, 2e-4], True),
        ([], True),
    ):
        assert ScaleGrid.of(torch.tensor(largest), LEVELS, torch.float32).short is short, largest


@pytest.mark.parametrize("bits", BITS)
@examples(25)
@given(dtype=st.sampled_from(CODED_DTYPES), drawn=st.sampled_from([(0.02, 1.0), (0.02, 0.02), (1.0, 0.3)]))
def test_rounded_weights_are_found_with_short_scales(bits, dtype, drawn):
    """Though a group that keeps a single value may have been rounded to any level."""
    size, kept = drawn
    generator = torch.Generator().manual_seed(0)
    weight = size * torch.randn(40, 300, generator=generator).clamp_(min=0.02)
    weight *= torch.rand(40, 300, generator=generator) < kept
    coded = CodedWeight.nearest(weight.to(dtype), bits)
    found = CodedWeight.exact(coded.unpack(), bits)
    assert coded.parts("")[".packed_scales"].dtype == found.parts("")[".packed_scales"].dtype == torch.uint8
    assert torch.equal(found.unpack(), coded.unpack())


def test_weights_with_outliers_have_others():
    weight = torch.randn(8, 256, generator=torch.Generator().manual_seed(0)) * 0.02
    weight[3, 5] = 300
    coded = CodedWeight.nearest(weight, 4)
    found = CodedWeight.exact(coded.unpack(), 4)
    assert found.parts("")[".packed_scales"].dtype == torch.bfloat16 and torch.equal(found.unpack(), coded.unpack())
