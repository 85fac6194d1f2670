from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

import optimum_neuronal.formats.coded as rounding
from optimum_neuronal.formats.code_checks import CODED_DTYPES as DTYPES
from optimum_neuronal.formats.codebooks import BITS, TABLES, magnitudes
from optimum_neuronal.formats.coded import GROUP, CodedWeight
from optimum_neuronal.formats.packed import PackedWeight
from optimum_neuronal.formats.scale_grid import scale_range


def sparse(shape, dtype=torch.float32, zeros=0.6, seed=0, size=1.0):
    generator = torch.Generator().manual_seed(seed)
    weight = (size * torch.randn(shape, generator=generator)).to(dtype)
    return weight.masked_fill(torch.rand(shape, generator=generator) < zeros, 0)


def test_two_and_eight_bits_by_hand():
    weight = torch.tensor([[127.0, 0, -42, 42, -127, 0]])
    coded = CodedWeight.exact(weight, 2)
    assert coded.scales.tolist() == [[1.0]] and coded.table.tolist() == [-127, -42, 42, 127]
    assert coded.mask.bits.tolist() == [0b011101] and coded.codes.tolist() == [0b00_10_01_11]
    assert torch.equal(coded.unpack(), weight) and coded.nbytes == 1 + 1 + 2 + 4
    weight = torch.tensor([[0.5, 0, -63.5, 1.0]])
    coded = CodedWeight.exact(weight, 8)
    assert coded.codes.view(torch.int8).tolist() == [1, -127, 2] and coded.scales.tolist() == [[0.5]]
    assert coded.table.dtype == torch.int8 and coded.table.numel() == 0
    assert torch.equal(coded.unpack(), weight)


SHAPES = [(1, 1), (3, 128), (5, 100), (2, 300), (130, 1), (2, 3, 70), (0, 5), (2, 0)]


@pytest.mark.parametrize("bits", BITS)
@examples(25)
@given(dtype=st.sampled_from(DTYPES), shape=st.sampled_from(SHAPES))
def test_what_was_rounded_has_exact_codes(bits, dtype, shape):
    weight = sparse(shape, dtype, size=0.03)
    coded = CodedWeight.nearest(weight, bits)
    rounded = coded.unpack()
    assert rounded.dtype == dtype and torch.equal(rounded != 0, weight != 0)
    again = CodedWeight.exact(rounded, bits)
    assert torch.equal(again.unpack(), rounded) and torch.equal(CodedWeight.rounded(rounded, bits).unpack(), rounded)
    if bits == 8 and weight.numel():
        assert (rounded - weight).abs().max() <= 0.01 * weight.abs().max()


def test_a_transposed_weight():
    """Of whole groups of columns, so that none is padded, and what lies across stays so."""
    for shape in ((128, 3), (256, 384), (2, 128, 5)):
        weight = sparse(shape).mT
        coded = CodedWeight.nearest(weight, 4)
        assert CodedWeight.exact(weight, 4) is None
        assert torch.equal(coded.unpack(), CodedWeight.nearest(weight.contiguous(), 4).unpack())


def test_rounding_errs_no_more_than_it_must():
    """Less than with the largest value as scale, and the less the more bits there are."""
    weight = sparse((64, 256))
    for bits, most in {8: 4e-5, 4: 0.012, 3: 0.045, 2: 0.16}.items():
        error = float((CodedWeight.nearest(weight, bits).unpack() - weight).square().sum() / weight.square().sum())
        assert error < most, bits


def test_an_outlier_is_clipped_or_sets_the_scale_whichever_errs_less():
    weight = torch.ones(1, 128)
    weight[0, 5] = 1.5
    clipped = CodedWeight.nearest(weight, 2, TABLES[2][0]).unpack()
    assert abs(clipped[0, 0] - 1) < 0.01 and clipped[0, 5] < 1.1
    weight[0, 5] = 100
    held = CodedWeight.nearest(weight, 8).unpack()
    assert abs(held[0, 5] - 100) < 1


def test_groups_have_scales_of_their_own_and_empty_ones_none():
    weight = sparse((2, 3 * GROUP - 5))
    weight[0, GROUP : 2 * GROUP] = 0
    weight[1] *= 1000
    coded = CodedWeight.nearest(weight, 4)
    assert coded.scales.shape == (2, 3) and coded.scales[0, 1] == 0 and (coded.scales != 0).sum() == 5
    assert torch.equal(CodedWeight.exact(coded.unpack(), 4).scales, coded.scales)


def test_a_weight_of_zeros_has_no_codes():
    weight = torch.zeros(3, 70)
    weight[0, 0] = -0.0
    for coded in (CodedWeight.exact(weight, 4), CodedWeight.nearest(weight, 4)):
        assert not len(coded.codes) and not coded.scales.any() and coded.scales.shape == (3, 1)
        assert not coded.unpack().view(torch.int32).any(), "-0.0 is a zero and comes back as +0.0"


def test_values_that_were_not_rounded_have_no_exact_codes():
    assert CodedWeight.exact(sparse((4, 128)), 4) is None
    weight = CodedWeight.nearest(sparse((4, 128)), 4).unpack()
    weight[3, weight[3].nonzero()[0]] *= 1.01
    assert CodedWeight.exact(weight, 4) is None


def test_a_table_that_errs_more_already_is_not_fitted_to_the_other_rows(monkeypatch):
    """That took most of the time; the choice is the one of all tables fitted to all rows."""
    weight = sparse((64, 128), zeros=0)
    errors = [(CodedWeight.nearest(weight, 4, table).unpack() - weight).square().sum() for table in TABLES[4]]
    monkeypatch.setattr(rounding, "BLOCK", 128)
    fitted, fit = [], rounding.fit_scales
    monkeypatch.setattr(rounding, "fit_scales", lambda *args: fitted.append(args) or fit(*args))
    assert CodedWeight.nearest(weight, 4).table.tolist() == list(TABLES[4][errors.index(min(errors))])
    assert 64 < len(fitted) < 0.8 * 64 * len(TABLES[4])


def test_a_table_of_ones_own():
    table = (-127, -70, -40, -20, 20, 40, 70, 127)
    coded = CodedWeight.nearest(sparse((3, 90)), 3, table)
    assert tuple(coded.table.tolist()) == table and coded.unpack().abs().unique().numel() <= 3 * 4 + 1
    with pytest.raises(ValueError, match="its table has 4 levels: expected 8"):
        CodedWeight.nearest(sparse((3, 90)), 3, TABLES[2][0])


def test_what_is_not_finite_or_no_matrix_is_refused():
    for bad in (float("nan"), float("inf"), -float("inf")):
        weight = sparse((2, 9))
        weight[1, 3] = bad
        for make in (CodedWeight.exact, CodedWeight.nearest):
            with pytest.raises(ValueError, match="NaN or infinite"):
                make(weight, 4)
    for weight in (torch.ones(4), torch.ones(2, 2, dtype=torch.float64), torch.ones(2, 2, dtype=torch.int8)):
        with pytest.raises(ValueError, match="expected at least two dimensions and one of torch.float16"):
            CodedWeight.nearest(weight, 4)


def test_the_largest_and_smallest_numbers():
    for bits, dtype in product([8, 3], DTYPES):
        large, small = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal
        weight = torch.tensor([[large, -large / 2], [small, -small / 4]], dtype=dtype)
        rounded = CodedWeight.nearest(weight, bits).unpack()
        assert rounded.isfinite().all() and (rounded != 0).all() and torch.equal(rounded.sign(), weight.sign())
        assert torch.equal(CodedWeight.exact(rounded, bits).unpack(), rounded)


@pytest.mark.parametrize("bits", BITS)
@examples(25)
@given(dtype=st.sampled_from(DTYPES), data=st.data())
def test_whatever_unpacks_has_exact_codes(bits, dtype, data):
    """Any scale of the range and any codes, of a known table: also where the largest level does not occur."""
    table = TABLES[bits][0]
    levels = torch.tensor(table or [*range(-127, 0), *range(1, 128)], dtype=torch.float32)
    low, high = scale_range(dtype, magnitudes(table))
    drawn = torch.tensor(data.draw(st.floats(low, high, width=64)), dtype=torch.float64)
    scale = drawn.bfloat16().float().clamp(low, high)
    drawn = data.draw(st.lists(st.integers(0, len(levels) - 1), min_size=1, max_size=130))
    weight = (scale * levels[drawn])[None].to(dtype)
    coded = CodedWeight.exact(weight, bits)
    assert coded is not None and torch.equal(coded.unpack(), weight)


def changed(*place_and_value):
    *place, value = place_and_value
    return lambda part: part.index_put_(
        tuple(torch.tensor(index) for index in place), torch.tensor(value, dtype=part.dtype)
    )


DAMAGE = [
    (4, "scales", lambda scales: scales.fill_(float("nan")), "its scale"),
    (4, "scales", lambda scales: scales.fill_(float("inf")), "its scale"),
    (4, "scales", lambda scales: scales.neg_(), "its scale"),
    (4, "scales", lambda scales: scales.zero_(), "its scale"),
    (4, "scales", lambda scales: scales[:, :1], "its scale"),
    (4, "scales", changed(1, 0, 1.0), "row 1 and group 0 .* since nothing is kept there"),
    (4, "scales", changed(1, 0, -0.0), "row 1 and group 0 .* since nothing is kept there"),
    (4, "codes", lambda codes: codes[:-1], "its codes"),
    (4, "table", lambda table: table.zero_(), "its table"),
    (4, "table", lambda table: table[:-1], "its table"),
    (8, "codes", changed(1, 0), "0 or -128"),
    (8, "codes", changed(1, 128), "0 or -128"),
]


def test_damage_is_an_error():
    weight = sparse((2, 200))
    weight[1, :128] = 0
    for bits, part, damage, message in DAMAGE:
        coded = CodedWeight.nearest(weight, bits)
        with pytest.raises(ValueError, match=message):
            replace(coded, **{part: damage(getattr(coded, part).clone())}).unpack()


def test_it_is_a_change_and_has_parts():
    weight = sparse((4, 70), torch.bfloat16)
    coded = CodedWeight.nearest(weight, 3)
    parts = coded.parts("w")
    assert list(parts) == ["w.packed_mask", "w.packed_codes", "w.packed_scales", "w.packed_table"]
    assert torch.equal(parts["w.packed_mask"], PackedWeight.pack(weight).mask.bits)
    again = CodedWeight.of_parts(parts, "w", coded.shape, 3, torch.bfloat16).to(torch.device("cpu"))
    target = torch.ones_like(weight)
    again.apply_to(target)
    assert torch.equal(target, coded.unpack()) and torch.equal(again.applied(weight), target)
