import dataclasses

import pytest
import torch
from coded import make_coded
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples
from test_packed_rows import flip

from optimum_neuronal.formats.codebooks import BITS
from optimum_neuronal.formats.coded import CodedWeight
from optimum_neuronal.inference.coded_rows import CodedRows
from optimum_neuronal.inference.packed_tensor import PackedTensor


@examples(30)
@given(
    out=st.integers(0, 40),
    columns=st.integers(0, 300) | st.sampled_from([64, 128, 256]),
    value_bits=st.sampled_from(BITS),
    density=st.sampled_from([0, 0.3, 1]),
    seed=st.integers(0, 1000),
    short=st.booleans(),
)
def test_any_weight_comes_back(out, columns, value_bits, density, seed, short):
    coded = make_coded(out, columns, value_bits, density, torch.bfloat16, seed, short)
    rows = CodedRows.of(coded)
    assert torch.equal(rows.unpack(), coded.unpack()) and rows.kept == int(coded.mask.unpack().sum())
    again = rows.to_packed()
    for name, part in coded.parts("").items():
        assert torch.equal(again.parts("")[name], part), name
    assert (again.bits, again.dtype, again.shape) == (coded.bits, coded.dtype, coded.shape)


def test_known_layout():
    """Codes lie from the lowest bit on; every word of 64 columns begins with a byte."""
    weight = torch.zeros(2, 70)
    weight[0, [1, 5, 66]] = torch.tensor([127.0, -42, 42])
    weight[1, 0] = 127
    rows = CodedRows.of(CodedWeight.exact(weight, 2))
    assert rows.codes.tolist() == [0b0111, 0b10, 0b11] and rows.offsets.tolist() == [0, 2, 3]
    assert rows.table.tolist() == [-127, -42, 42, 127] and rows.scales.view(torch.bfloat16).tolist() == [[1], [1]]
    assert rows.nbytes == 2 * 16 + 3 + 3 * 8 + 2 * 2 + 4 and rows.value_bits == 2


def test_parts_and_wholes():
    coded = make_coded(12, 200, 3)
    rows, dense = CodedRows.of(coded), coded.unpack()
    for part in (rows.part(4, 9), rows.window(4, 9)):
        assert torch.equal(part.unpack(), dense[4:9])
    joined = CodedRows.joined([rows.part(4, 9), rows.part(0, 2)])
    joined.check()
    assert torch.equal(joined.unpack(), torch.cat([dense[4:9], dense[:2]]))
    assert rows.joins(joined) and not rows.joins(CodedRows.of(make_coded(4, 200, 2)))
    assert not rows.joins(CodedRows.of(coded, "bf16"))


def test_rows_of_several_weights_with_short_and_other_scales():
    coded = [make_coded(3, 200, 3, short=short) for short in (True, False)]
    rows = [CodedRows.of(weight) for weight in coded]
    assert [part.scales.dtype for part in rows] == [torch.uint8, torch.int16] and rows[0].joins(rows[1])
    joined = CodedRows.joined(rows)
    joined.check()
    assert torch.equal(joined.unpack(), torch.cat([weight.unpack() for weight in coded]))
    assert CodedRows.joined(rows[:1] * 2).scales.dtype == torch.uint8


def test_only_results_are_converted():
    for short in [True, False]:
        coded = make_coded(6, 200, 4, short=short)
        rows = CodedRows.of(coded).converted(None, torch.float16)
        assert rows.dtype == torch.float16 and rows.scales.dtype == (torch.uint8 if short else torch.int16)
        assert torch.equal(rows.unpack(), coded.unpack().half())


def test_damage_is_found():
    for damage, message in [
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
    ]:
        rows = CodedRows.of(make_coded(5, 68, 4))
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(rows, **damage(rows)).check()


def test_as_a_tensor():
    for transposed in [False, True]:
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
