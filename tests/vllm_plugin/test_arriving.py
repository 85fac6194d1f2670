import pytest
import torch

from optimum_neuronal.packed.formats.quantized import QuantizedWeight
from optimum_neuronal.packed.formats.sparse import SparseWeight
from optimum_neuronal.vllm_plugin.arriving import ArrivingRows, ArrivingWeight, PackedRows


CPU = torch.device("cpu")


def weight(rows, columns=64, share=0.8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    dense = torch.randn(rows, columns, generator=generator)
    return dense.masked_fill(torch.rand(rows, columns, generator=generator) < share, 0).bfloat16()


def arriving(rows, columns=64, packs_sparse=True):
    return ArrivingWeight((rows, columns), torch.bfloat16, CPU, packs_sparse)


def dense_of(found):
    return found if isinstance(found, torch.Tensor) else torch.cat([matrix.unpack() for matrix in found])


@pytest.mark.parametrize("packed", [False, True])
def test_merged_rows_become_one_matrix(packed):
    """As vLLM's loader of q, k and v does it, in another order than they lie in, and with a slice of each."""
    whole, held = [weight(128, seed=1), weight(64, seed=2), weight(64, seed=3)], arriving(128)
    for first, count, part in [(96, 32, whole[2]), (0, 64, whole[0]), (64, 32, whole[1])]:
        rows = PackedRows(SparseWeight.pack(part)) if packed else part
        ArrivingRows(held).data.narrow(0, first, count).copy_(rows.narrow(0, 0, count))
    (matrix,) = held.finish("qkv_proj")
    assert isinstance(matrix, SparseWeight)
    assert torch.equal(matrix.unpack(), torch.cat([whole[0][:64], whole[1][:32], whole[2][:32]]))


def test_parts_of_other_codes_stay_apart():
    parts = [QuantizedWeight.nearest(weight(64, seed=bits), bits) for bits in (2, 3, 3)]
    held = arriving(192)
    for number, part in enumerate(parts):
        ArrivingRows(held).narrow(0, 64 * number, 64).copy_(PackedRows(part))
    found = held.finish("qkv_proj")
    assert [(matrix.bits, matrix.shape[0]) for matrix in found] == [(2, 64), (3, 128)]
    assert torch.equal(dense_of(found), torch.cat([part.unpack() for part in parts]))


def test_what_is_not_smaller_packed_stays_dense_unless_a_neighbour_is_packed():
    dense, sparse = weight(64, share=0), weight(64, seed=1)
    for other, kind in [(dense, torch.Tensor), (sparse, list)]:
        held = arriving(128)
        ArrivingRows(held)[:64].copy_(dense)
        ArrivingRows(held)[64:].copy_(other)
        found = held.finish("gate_up_proj")
        assert isinstance(found, kind)
        assert torch.equal(dense_of(found), torch.cat([dense, other]))


def test_embeddings_stay_packed_only_if_they_are_quantized():
    """And padding of the vocabulary is no row of them."""
    codes = QuantizedWeight.nearest(weight(100, share=0))
    for rows, kind in [(PackedRows(codes), list), (PackedRows(SparseWeight.pack(weight(100))), torch.Tensor)]:
        held = arriving(128, packs_sparse=False)
        ArrivingRows(held)[: rows.shape[0]].data.copy_(rows)
        ArrivingRows(held)[rows.shape[0] :].data.fill_(0)
        found = held.finish("embed_tokens")
        assert isinstance(found, kind) and held.padding == 28
        assert torch.equal(dense_of(found), rows.matrix.unpack())


def test_of_a_slice_no_more_is_kept_in_memory_than_itself():
    for whole in (weight(256), PackedRows(SparseWeight.pack(weight(256))), weight(256, share=0)):
        held = arriving(64)
        ArrivingRows(held).copy_(whole.narrow(0, 64, 64))
        found = held.finish("o_proj")
        tensors = [found] if isinstance(found, torch.Tensor) else found[0].tensors().values()
        assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in tensors)
        expected = whole.matrix.unpack() if isinstance(whole, PackedRows) else whole
        assert torch.equal(dense_of(found), expected[64:128])


@pytest.mark.parametrize("columns", [(0, 24), (20, 44), (40, 64)])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_slices_of_columns_keep_their_codes(columns, bits):
    """As vLLM's loader of o_proj or down_proj cuts it for one of several processes."""
    codes, (first, last) = QuantizedWeight.nearest(weight(100, share=0), bits), columns
    held = arriving(100, last - first)
    ArrivingRows(held).copy_(PackedRows(codes).narrow(1, first, last - first))
    (matrix,) = held.finish("o_proj")
    assert isinstance(matrix, QuantizedWeight) and matrix.bits == bits
    matrix.check()
    assert torch.equal(matrix.unpack(), codes.unpack()[:, first:last])


def test_missing_rows_and_other_shapes_raise():
    held = arriving(128)
    ArrivingRows(held).narrow(0, 0, 64).copy_(weight(64))
    with pytest.raises(
        ValueError, match="layers.0.qkv_proj got 64 rows of its weight: expected 128. The checkpoint lacks"
    ):
        held.finish("layers.0.qkv_proj")
    with pytest.raises(ValueError, match=r"has \[64, 32\] elements of a weight: expected \[128, 64\]"):
        ArrivingRows(held).copy_(weight(64, 32))
    with pytest.raises(ValueError, match="narrowed along dimension 1: expected 0"):
        ArrivingRows(held).narrow(1, 0, 32)
