"""Sparse weights: a bitmask and the values that are kept."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples
from weights import bits, sparse

from optimum_neuronal.model.change import NewWeight, Zeros
from optimum_neuronal.packed.formats import packed_matrix
from optimum_neuronal.packed.formats.quantized import QuantizedWeight
from optimum_neuronal.packed.formats.sparse import SparseWeight, count_kept, of_parts, parts_of, sparse_bytes


def test_known_layout():
    """Element j of a row is bit j % 8 of byte j // 8; rows begin at whole words; values follow row by row."""
    weight = SparseWeight.pack(torch.tensor([[0, 1.5, 0, 0, 2], [0, 0, 0, 0, 0], [0, 0, 0, 0, -3]]))
    assert weight.shape == (3, 5) and weight.mask.shape == (3, 8)
    assert weight.mask[:, 0].tolist() == [0b10010, 0, 0b10000] and not weight.mask[:, 1:].any()
    assert weight.values.tolist() == [1.5, 2, -3] and weight.offsets.tolist() == [0, 2, 2, 3]
    assert weight.nbytes == 3 * 8 + 3 * 4 + 4 * 8
    assert sum(part.nbytes for part in weight.stored().values()) == sparse_bytes((3, 5), 3, 4)


@examples(60)
@given(
    shape=st.tuples(st.integers(0, 3), st.integers(0, 20), st.integers(0, 200) | st.sampled_from([64, 128])),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn]),
    density=st.sampled_from([0, 0.3, 1]),
    seed=st.integers(0, 1000),
)
def test_weights_of_any_bits_come_back(shape, dtype, density, seed):
    weight = sparse(shape, dtype, density, seed)
    found = SparseWeight.pack(weight)
    if weight.numel() and dtype in packed_matrix.DTYPES:
        found.check()
    assert torch.equal(bits(found.unpack()), bits(weight)) and len(found.values) == count_kept(weight)


def test_more_than_one_block(monkeypatch):
    weight = sparse((150, 29))
    whole = SparseWeight.pack(weight)
    monkeypatch.setattr(packed_matrix.row_blocks, "__defaults__", (64,))
    again = SparseWeight.pack(weight)
    again.check()
    assert torch.equal(again.mask, whole.mask) and torch.equal(bits(again.values), bits(whole.values))
    assert torch.equal(bits(again.unpack()), bits(weight))


def flip(tensor: torch.Tensor, *index: int) -> torch.Tensor:
    changed = tensor.clone()
    changed[index] ^= 1
    return changed


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda w: {"mask": flip(w.mask, 2, 3)}, "its bitmask keeps in row 2"),
        (lambda w: {"mask": flip(w.mask, 1, 9)}, "bits set behind a row's 68 elements"),
        (lambda w: {"mask": w.mask[:, :8]}, r"its mask have dtype torch.uint8 and shape \[5, 8\]"),
        (lambda w: {"mask": w.mask.int()}, "its mask have dtype torch.int32"),
        (lambda w: {"mask": w.mask.t().contiguous().t()}, "its mask are not contiguous"),
        (lambda w: {"offsets": w.offsets + 1}, "keeps 120 values, but 120 are stored|its bitmask keeps"),
        (lambda w: {"offsets": w.offsets[:-1]}, r"expected torch.int64 and \[6\]"),
        (lambda w: {"offsets": w.offsets[[0, 2, 1, 3, 4, 5]]}, "its bitmask keeps in row 0"),
        (lambda w: {"values": w.values[:-1]}, r"its bitmask keeps \d+ values, but \d+ are stored"),
        (lambda w: {"values": w.values[None]}, "its values have dtype"),
        (lambda w: {"values": w.values.to("meta")}, "its values lie on meta, but its mask on cpu"),
    ],
)
def test_damage_is_found(damage, message):
    weight = SparseWeight.pack(sparse((5, 68), torch.bfloat16))
    weight.check()
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(weight, **damage(weight)).check()


WEIGHT = torch.randn(70, 9, generator=torch.Generator().manual_seed(0)).bfloat16()
STEPPED = QuantizedWeight.encode(
    torch.arange(630).remainder(8).to(torch.uint8).view(70, 9), 3, torch.ones(70).bfloat16(), torch.ones(9).bfloat16()
)


@pytest.mark.parametrize(
    "change",
    [
        Zeros(WEIGHT > 0.5),
        NewWeight(WEIGHT.masked_fill(WEIGHT > 0.5, 0)),
        *(QuantizedWeight.nearest(WEIGHT, bits) for bits in range(2, 9)),
        STEPPED,
    ],
    ids=lambda change: f"{type(change).__name__} {getattr(change, 'bits', '')}",
)
def test_changes_as_tensors_and_back(change):
    other = parts_of(QuantizedWeight.nearest(WEIGHT, 4), WEIGHT, "a.b.c")
    tensors = parts_of(change, WEIGHT, "a.b") | other
    found = of_parts(tensors, "a.b", (70, 9), torch.bfloat16)
    assert torch.equal(found.applied(WEIGHT), change.applied(WEIGHT))
    if isinstance(change, QuantizedWeight):
        assert isinstance(found, QuantizedWeight) and found.bits == change.bits
        assert (found.steps is None) == (change.steps is None)
