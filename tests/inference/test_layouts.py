"""The layouts that kernels compute with: rows of values, of codes, and of levels in 8 bits."""

import dataclasses

import pytest
import torch
from coded import make_coded
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples
from weights import all_rows, bits, make_int8, sparse

from optimum_neuronal.formats.codebooks import BITS
from optimum_neuronal.formats.coded import CodedWeight
from optimum_neuronal.formats.packed import PackedWeight
from optimum_neuronal.inference import bit_rows
from optimum_neuronal.inference.coded_rows import CodedRows
from optimum_neuronal.inference.int8_rows import Int8Rows
from optimum_neuronal.inference.layouts import rows_of
from optimum_neuronal.inference.packed_rows import DTYPES, PackedRows
from optimum_neuronal.inference.packed_tensor import PackedTensor
from optimum_neuronal.inference.torch_fallback import unpack_rows


OUT = st.integers(0, 40)


def test_known_layout_of_values():
    """Element j of a row is bit j % 8 of byte j // 8; rows begin at whole words; values follow row by row."""
    weight = torch.tensor([[0, 1.5, 0, 0, 2], [0, 0, 0, 0, 0], [0, 0, 0, 0, -3]])
    rows = PackedRows.of(PackedWeight.pack(weight))
    assert rows.shape == (3, 5) and rows.bits.shape == (3, 8)
    assert rows.bits[:, 0].tolist() == [0b10010, 0, 0b10000] and not rows.bits[:, 1:].any()
    assert rows.values.tolist() == [1.5, 2, -3] and rows.offsets.tolist() == [0, 2, 2, 3]
    assert rows.offsets.dtype == torch.int64 and rows.nbytes == 3 * 8 + 3 * 4 + 4 * 8


def test_known_layout_of_codes():
    """Codes lie from the lowest bit on; every word of 64 columns begins with a byte."""
    weight = torch.zeros(2, 70)
    weight[0, [1, 5, 66]] = torch.tensor([127.0, -42, 42])
    weight[1, 0] = 127
    rows = CodedRows.of(CodedWeight.exact(weight, 2))
    assert rows.codes.tolist() == [0b0111, 0b10, 0b11] and rows.offsets.tolist() == [0, 2, 3]
    assert rows.table.tolist() == [-127, -42, 42, 127] and rows.scales.view(torch.bfloat16).tolist() == [[1], [1]]
    assert rows.nbytes == 2 * 16 + 3 + 3 * 8 + 2 * 2 + 4 and rows.value_bits == 2


@examples(100)
@given(
    out=OUT,
    columns=st.integers(0, 200) | st.sampled_from([64, 128, 192]),
    dtype=st.sampled_from(DTYPES),
    density=st.sampled_from([0, 0.3, 1]),
    seed=st.integers(0, 1000),
)
def test_values_of_any_bits_come_back(out, columns, dtype, density, seed):
    weight = sparse((out, columns), dtype, density, seed)
    packed = PackedWeight.pack(weight)
    rows = PackedRows.of(packed)
    rows.check()
    assert torch.equal(bits(unpack_rows(rows.bits, rows.values, rows.offsets, columns)), bits(weight))
    again = rows.to_packed()
    assert torch.equal(again.mask.bits, packed.mask.bits) and torch.equal(bits(again.values), bits(packed.values))
    assert again.shape == packed.shape


@examples(30)
@given(
    out=OUT,
    columns=st.integers(0, 300) | st.sampled_from([64, 128, 256]),
    value_bits=st.sampled_from(BITS),
    density=st.sampled_from([0, 0.3, 1]),
    seed=st.integers(0, 1000),
    short=st.booleans(),
)
def test_any_codes_come_back(out, columns, value_bits, density, seed, short):
    coded = make_coded(out, columns, value_bits, density, torch.bfloat16, seed, short)
    rows = CodedRows.of(coded)
    assert torch.equal(rows.unpack(), coded.unpack()) and rows.kept == int(coded.mask.unpack().sum())
    again = rows.to_packed()
    for name, part in coded.parts("").items():
        assert torch.equal(again.parts("")[name], part), name
    assert (again.bits, again.dtype, again.shape) == (coded.bits, coded.dtype, coded.shape)


def test_nothing_is_copied_where_rows_are_whole_words():
    packed = PackedWeight.pack(sparse((8, 128)))
    rows = PackedRows.of(packed)
    assert rows.bits.data_ptr() == packed.mask.bits.data_ptr() and rows.values is packed.values
    assert rows.to_packed().mask.bits.data_ptr() == packed.mask.bits.data_ptr()


def test_more_than_one_block(monkeypatch):
    weight = sparse((37, 29))
    whole = PackedRows.of(PackedWeight.pack(weight))
    monkeypatch.setattr(bit_rows.row_blocks, "__defaults__", (64,))
    rows = PackedRows.of(PackedWeight.pack(weight))
    rows.check()
    assert torch.equal(rows.bits, whole.bits) and torch.equal(rows.offsets, whole.offsets)
    assert torch.equal(rows.to_packed().mask.bits, whole.to_packed().mask.bits)


def test_weights_that_have_no_rows():
    packed = PackedWeight.pack(torch.eye(4))
    short = dataclasses.replace(packed.mask, bits=packed.mask.bits[:1])
    for weight, message in (
        (PackedWeight.pack(torch.ones(2, 3, 4)), r"a matrix was expected, but the weight has shape \[2, 3, 4\]"),
        (PackedWeight.pack(torch.ones(2, 3).double()), r"torch.float64: there are kernels for torch.bfloat16"),
        (PackedWeight(packed.mask, packed.values[:3]), "keeps 4 values, but 3 are stored"),
        (PackedWeight(short, packed.values), r"shape \[1\]: expected torch.uint8 and \[2\]"),
    ):
        with pytest.raises(ValueError, match=message):
            PackedRows.of(weight)


def test_rows_are_cut_joined_and_converted():
    """Of codes and levels, only results are converted."""
    for rows, bf16 in zip(all_rows(12, 200), all_rows(12, 200, torch.bfloat16)):
        dense = rows.unpack()
        for part in (rows.part(4, 9), rows.window(4, 9)):
            assert torch.equal(part.unpack(), dense[4:9])
        joined = rows.joined([rows.part(4, 9), rows.part(0, 2)])
        joined.check()
        assert torch.equal(joined.unpack(), torch.cat([dense[4:9], dense[:2]]))
        assert rows.joins(joined) and not rows.joins(bf16)
        again = rows_of(rows.kind, [getattr(rows, name) for name in rows.names], 200)
        assert type(again) is type(rows) and again.kind == rows.kind and torch.equal(again.unpack(), dense)
        half = rows.converted(None, torch.float16)
        assert half.dtype == torch.float16 and torch.equal(half.unpack(), dense.half())
    codes, as_floats, levels = (all_rows(12, 200)[i] for i in (1, 2, 3))
    assert not codes.joins(all_rows(12, 200, value_bits=2)[1]) and not codes.joins(as_floats)
    assert not levels.joins(Int8Rows.of(levels.to_packed(), "bf16"))
    assert levels.converted(None, torch.float16).scales.dtype == torch.int16
    assert levels.nbytes == 12 * 200 + 12 * 2 * 2 and levels.kept == 2400


def test_short_and_other_scales():
    coded = [make_coded(3, 200, 3, short=short) for short in (True, False)]
    rows = [CodedRows.of(weight) for weight in coded]
    for part, dtype in zip(rows, (torch.uint8, torch.int16)):
        assert part.scales.dtype == part.converted(None, torch.float16).scales.dtype == dtype
    assert rows[0].joins(rows[1])
    joined = CodedRows.joined(rows)
    joined.check()
    assert torch.equal(joined.unpack(), torch.cat([weight.unpack() for weight in coded]))
    assert CodedRows.joined(rows[:1] * 2).scales.dtype == torch.uint8


def test_levels_are_looked_up_alone():
    int8 = make_int8(12, 200, torch.bfloat16)
    rows, dense, ids = Int8Rows.of(int8), int8.unpack(), torch.tensor([[3, 0], [11, 3]])
    for numbers in (ids, ids.int()):
        assert torch.equal(rows.look_up(numbers), dense[ids])
    assert rows.look_up(ids[:0]).shape == (0, 2, 200)
    for bad in (-1, 12):
        with pytest.raises((IndexError, RuntimeError)):
            rows.look_up(torch.tensor([bad]))


def flip(tensor: torch.Tensor, *index: int) -> torch.Tensor:
    changed = tensor.clone()
    changed[index] ^= 1
    return changed


DAMAGE = {
    PackedRows: [
        (lambda rows: {"bits": flip(rows.bits, 2, 3)}, r"of row 2, but by its offsets there are"),
        (lambda rows: {"bits": flip(rows.bits, 1, 9)}, r"bits set behind a row's 68 elements"),
        (lambda rows: {"bits": rows.bits[:, :8]}, r"its bits have dtype torch.uint8 and shape \[5, 8\]"),
        (lambda rows: {"bits": rows.bits.int()}, r"its bits have dtype torch.int32"),
        (lambda rows: {"bits": rows.bits.t().contiguous().t()}, r"its bits are not contiguous"),
        (lambda rows: {"offsets": rows.offsets + 1}, r"its offsets go from 1 to"),
        (lambda rows: {"offsets": rows.offsets[:-1]}, r"expected torch.int64 and \[6\]"),
        (lambda rows: {"offsets": rows.offsets[[0, 2, 1, 3, 4, 5]]}, r"of row 0, but by its offsets there are"),
        (lambda rows: {"values": rows.values[:-1]}, r"its offsets go from 0 to \d+: expected 0 to"),
        (lambda rows: {"values": rows.values.double()}, r"values have dtype torch.float64"),
        (lambda rows: {"values": rows.values.to("meta")}, r"its bits lie on cpu, but its values on meta"),
    ],
    CodedRows: [
        (lambda rows: {"bits": flip(rows.bits, 2, 3)}, r"bytes of codes of row 2, but by its offsets there are"),
        (lambda rows: {"bits": flip(rows.bits, 1, 9)}, r"bits set behind a row's 68 elements"),
        (lambda rows: {"offsets": rows.offsets + 1}, r"its offsets go from 1 to"),
        (lambda rows: {"codes": rows.codes[:-1]}, r"its offsets go from 0 to \d+: expected 0 to"),
        (lambda rows: {"codes": rows.codes.int()}, r"its codes have dtype torch.int32"),
        (lambda rows: {"scales": rows.scales[:, :0]}, r"its scales have dtype torch.uint8 and shape \[5, 0\]"),
        (lambda rows: {"scales": torch.full((5, 1), 0x7F80, dtype=torch.int16)}, r"its scales are not all finite"),
        (lambda rows: {"table": rows.table[:5]}, r"its table has 5 levels"),
        (lambda rows: {"table": rows.table.flip(0)}, r"its table is .*ascending"),
        (lambda rows: {"table": rows.table.to("meta")}, r"its table lie on meta"),
    ],
    Int8Rows: [
        (lambda rows: {"levels": torch.full_like(rows.levels, -128)}, "-128 among them"),
        (lambda rows: {"levels": rows.levels.int()}, "its levels have dtype torch.int32"),
        (lambda rows: {"levels": rows.levels[1:]}, "its levels have dtype"),
        (lambda rows: {"scales": torch.full_like(rows.scales, 0x7F80)}, "its scales are not all finite"),
        (lambda rows: {"scales": rows.scales[:, :0]}, "its scales have dtype"),
        (lambda rows: {"scales": rows.scales.to("meta")}, "its scales lie on meta"),
    ],
}


def test_damage_is_found():
    for rows in all_rows(5, 68, torch.bfloat16):
        rows.check()
        for damage, message in DAMAGE[type(rows)]:
            with pytest.raises(ValueError, match=message):
                dataclasses.replace(rows, **damage(rows)).check()


@pytest.mark.parametrize("transposed", [False, True])
def test_codes_as_a_tensor(transposed):
    stack = torch.stack([make_coded(6, 70, 4, seed=seed).unpack() for seed in range(3)])
    coded = CodedWeight.rounded(stack, 4)
    tensor = PackedTensor.of(coded, transposed)
    expected = coded.unpack().mT if transposed else coded.unpack()
    assert tensor.shape == expected.shape and torch.equal(tensor.unpack(), expected) and tensor.packed() is None
    again, swapped = tensor.coded()
    assert swapped == transposed and torch.equal(again.unpack(), coded.unpack())
    if not transposed:
        assert isinstance(tensor[1], PackedTensor) and torch.equal(tensor[1].unpack(), expected[1])
        both = torch.cat([tensor, tensor.clone()])
        assert isinstance(both, PackedTensor) and torch.equal(both.unpack(), torch.cat([expected, expected]))
        other = PackedTensor.of(CodedWeight.rounded(stack, 3))
        assert type(torch.cat([tensor, other])) is torch.Tensor, "of another table: not packed"


def test_levels_as_a_tensor():
    int8 = make_int8(12, 200)
    tensor = PackedTensor.of(int8)
    assert torch.equal(tensor.unpack(), int8.unpack()) and tensor.packed() is None and tensor.coded() is None
    assert torch.equal(tensor.int8().levels, int8.levels) and tensor[2:5].int8().shape == (3, 200)
    half = tensor.to(torch.float16)
    assert half.dtype == half.unpack().dtype == torch.float16 and tensor[None].int8() is None
    assert half.int8().dtype == int8.dtype, "files have the dtype in which it was rounded"
