from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

from optimum_neuronal.formats.code_checks import CODED_DTYPES as DTYPES
from optimum_neuronal.formats.int8_weight import Int8Weight, int8_bytes


def test_by_hand():
    weight = torch.tensor([[63.5, 0, -0.5, 1.0], [0, 0, 0, 0]])
    int8 = Int8Weight.nearest(weight)
    assert int8.levels.tolist() == [[127, 0, -1, 2], [0, 0, 0, 0]] and int8.scales.tolist() == [[0.5], [0.0]]
    assert torch.equal(int8.unpack(), weight) and int8.nbytes == 8 + 4 == int8_bytes((2, 4))
    assert not Int8Weight.exact(torch.tensor([[-0.0, 127.0]])).unpack().signbit().any()
    assert int8.error(weight) == 0 and Int8Weight.nearest(torch.zeros(2, 3)).error(torch.zeros(2, 3)) == 0


SHAPES = [(1, 1), (3, 128), (5, 100), (7, 300), (130, 1)]


@pytest.mark.parametrize("dtype", DTYPES)
@examples(25)
@given(size=st.sampled_from([1e-7, 1e-5, 0.03, 1.0, 400.0]), shape=st.sampled_from(SHAPES))
def test_what_was_rounded_has_exact_levels(dtype, size, shape):
    """Also where values are so small that the least scale is all there is, and so large that the largest is."""
    weight = (size * torch.randn(shape, generator=torch.Generator().manual_seed(0))).to(dtype)
    weight[0] = 0
    weight[-1, 0] = 160 * size
    int8 = Int8Weight.nearest(weight)
    int8.check()
    rounded = int8.unpack()
    assert rounded.dtype == dtype and bool(rounded.isfinite().all())
    again = Int8Weight.exact(rounded)
    again.check()
    assert torch.equal(again.unpack(), rounded) and torch.equal(Int8Weight.rounded(rounded).unpack(), rounded)
    step = torch.nn.functional.pad(weight.float().abs(), (0, -shape[1] % 128)).view(shape[0], -1, 128).amax(-1) / 127
    least = step.repeat_interleave(128, 1)[:, : shape[1]].clamp(min=2**-17 if dtype == torch.float16 else 0)
    assert ((rounded.float() - weight.float()).abs() <= 0.51 * least + 2**-8 * weight.float().abs()).all()


def test_the_largest_numbers_stay_finite():
    for dtype in DTYPES:
        weight = torch.full((1, 3), torch.finfo(dtype).max, dtype=dtype)
        held = Int8Weight.nearest(weight).unpack()
        assert held.isfinite().all() and torch.equal(Int8Weight.rounded(held).unpack(), held)


def test_what_was_not_rounded_has_none():
    weight = torch.randn(300, 200, generator=torch.Generator().manual_seed(1))
    assert Int8Weight.exact(weight) is None
    rounded = Int8Weight.nearest(weight).unpack()
    rounded[299, 199] *= 1.001
    assert Int8Weight.exact(rounded) is None
    assert 1e-6 < Int8Weight.nearest(weight).error(weight) < 1e-4


def test_a_transposed_matrix():
    weight = torch.randn(256, 5, generator=torch.Generator().manual_seed(1)).T
    int8 = Int8Weight.nearest(weight)
    assert Int8Weight.exact(weight) is None and int8.levels.is_contiguous()
    assert torch.equal(int8.unpack(), Int8Weight.nearest(weight.contiguous()).unpack())


def test_what_has_no_8_bits_is_refused():
    for weight, message in (
        (torch.zeros(3), "expected a matrix"),
        (torch.zeros(2, 0), "expected a matrix"),
        (torch.zeros(2, 2, 2), "expected a matrix"),
        (torch.zeros(2, 2, dtype=torch.float64), "torch.float64 cannot be held"),
        (torch.full((2, 2), torch.nan), "NaN or infinite"),
        (torch.full((2, 2), torch.inf), "NaN or infinite"),
    ):
        for make in (Int8Weight.exact, Int8Weight.nearest, Int8Weight.rounded):
            with pytest.raises(ValueError, match=message):
                make(weight)


def test_damage_is_told():
    for field, value, message in [
        ("levels", -128, "-128 among them"),
        ("scales", torch.nan, "its scale of row 1 and group 0 is nan: expected one of"),
        ("scales", torch.inf, "is inf"),
        ("scales", -1.0, "is -1.0"),
        ("scales", 0.0, "is 0.0"),
        ("scales", 1e-39, "expected one of"),
    ]:
        int8 = Int8Weight.nearest(torch.randn(3, 5, generator=torch.Generator().manual_seed(0)))
        damaged = getattr(int8, field).clone()
        damaged[1, 0] = value
        with pytest.raises(ValueError, match=message):
            replace(int8, **{field: damaged}).check()
        with pytest.raises(ValueError, match="expected 0, since all its codes are"):
            replace(int8, levels=torch.zeros_like(int8.levels)).check()
        with pytest.raises(ValueError, match="its scales have"):
            replace(int8, scales=int8.scales.float()).check()


@examples(25)
@given(
    rows=st.integers(1, 5),
    columns=st.integers(1, 300),
    dtype=st.sampled_from(DTYPES),
    power=st.integers(-40, 40),
    seed=st.integers(0, 1000),
)
def test_rounding_twice_is_rounding_once(rows, columns, dtype, power, seed):
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 2.0**power
    weight = weight.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)
    rounded = Int8Weight.nearest(weight).unpack()
    again = Int8Weight.exact(rounded)
    again.check()
    assert torch.equal(again.unpack(), rounded)
