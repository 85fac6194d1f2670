import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

from optimum_neuronal.formats.bitmask import INTEGERS
from optimum_neuronal.formats.packed import PackedWeight
from optimum_neuronal.inference import bit_rows
from optimum_neuronal.inference.packed_rows import DTYPES, PackedRows
from optimum_neuronal.inference.torch_fallback import unpack_rows


FUZZ = examples(100)


def sparse(shape, dtype=torch.float32, density=0.3, seed=0) -> torch.Tensor:
    """A weight of any bits, zero but for a share of its elements: NaN, infinity, subnormal numbers and -0.0 among them."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), generator=generator, dtype=torch.uint8)
    weight = raw.view(-1).view(dtype).view(shape)
    weight.view(INTEGERS[dtype.itemsize])[torch.rand(shape, generator=generator) >= density] = 0
    if weight.numel():
        weight.view(-1)[0] = -0.0
    return weight


def bits(weight):
    return weight.view(INTEGERS[weight.element_size()])


def test_known_layout():
    """Element j of a row is bit j % 8 of byte j // 8; rows begin at whole words; values follow row by row."""
    weight = torch.tensor([[0, 1.5, 0, 0, 2], [0, 0, 0, 0, 0], [0, 0, 0, 0, -3]])
    rows = PackedRows.of(PackedWeight.pack(weight))
    assert rows.shape == (3, 5) and rows.bits.shape == (3, 8)
    assert rows.bits[:, 0].tolist() == [0b10010, 0, 0b10000] and not rows.bits[:, 1:].any()
    assert rows.values.tolist() == [1.5, 2, -3] and rows.offsets.tolist() == [0, 2, 2, 3]
    assert rows.offsets.dtype == torch.int64 and rows.nbytes == 3 * 8 + 3 * 4 + 4 * 8


def test_nothing_is_copied_where_rows_are_whole_words():
    packed = PackedWeight.pack(sparse((8, 128)))
    rows = PackedRows.of(packed)
    assert rows.bits.data_ptr() == packed.mask.bits.data_ptr() and rows.values is packed.values
    assert rows.to_packed().mask.bits.data_ptr() == packed.mask.bits.data_ptr()


@FUZZ
@given(
    out=st.integers(0, 40),
    columns=st.integers(0, 200) | st.sampled_from([64, 128, 192]),
    dtype=st.sampled_from(DTYPES),
    density=st.sampled_from([0, 0.3, 1]),
    seed=st.integers(0, 1000),
)
def test_any_bits_come_back(out, columns, dtype, density, seed):
    weight = sparse((out, columns), dtype, density, seed)
    packed = PackedWeight.pack(weight)
    rows = PackedRows.of(packed)
    rows.check()
    assert torch.equal(bits(unpack_rows(rows.bits, rows.values, rows.offsets, columns)), bits(weight))
    again = rows.to_packed()
    assert torch.equal(again.mask.bits, packed.mask.bits) and torch.equal(bits(again.values), bits(packed.values))
    assert again.shape == packed.shape


def test_more_than_one_block(monkeypatch):
    weight = sparse((37, 29))
    whole = PackedRows.of(PackedWeight.pack(weight))
    monkeypatch.setattr(bit_rows.row_blocks, "__defaults__", (64,))
    rows = PackedRows.of(PackedWeight.pack(weight))
    rows.check()
    assert torch.equal(rows.bits, whole.bits) and torch.equal(rows.offsets, whole.offsets)
    assert torch.equal(rows.to_packed().mask.bits, whole.to_packed().mask.bits)


def test_only_matrices_of_known_dtypes():
    with pytest.raises(ValueError, match=r"a matrix was expected, but the weight has shape \[2, 3, 4\]"):
        PackedRows.of(PackedWeight.pack(torch.ones(2, 3, 4)))
    with pytest.raises(ValueError, match=r"torch.float64: there are kernels for torch.bfloat16"):
        PackedRows.of(PackedWeight.pack(torch.ones(2, 3, dtype=torch.float64)))


def test_values_that_the_mask_does_not_keep():
    packed = PackedWeight.pack(torch.eye(4))
    with pytest.raises(ValueError, match="keeps 4 values, but 3 are stored"):
        PackedRows.of(PackedWeight(packed.mask, packed.values[:3]))
    short = dataclasses.replace(packed.mask, bits=packed.mask.bits[:1])
    with pytest.raises(ValueError, match=r"shape \[1\]: expected torch.uint8 and \[2\]"):
        PackedRows.of(PackedWeight(short, packed.values))


def flip(tensor: torch.Tensor, *index: int) -> torch.Tensor:
    changed = tensor.clone()
    changed[index] ^= 1
    return changed


def test_damage_is_found():
    for damage, message in [
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
    ]:
        rows = PackedRows.of(PackedWeight.pack(sparse((5, 68), torch.bfloat16)))
        rows.check()
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(rows, **damage(rows)).check()
