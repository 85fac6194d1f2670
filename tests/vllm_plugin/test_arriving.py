import pytest
import torch

from optimum_neuronal.packed.packed_weight import PackedWeight
from optimum_neuronal.vllm_plugin.arriving import ArrivingRows, PackedRows


def weight(rows, columns=64, share=0.8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    dense = torch.randn(rows, columns, generator=generator)
    return dense.masked_fill(torch.rand(rows, columns, generator=generator) < share, 0).bfloat16()


def arriving(rows, columns=64):
    return ArrivingRows((rows, columns), torch.bfloat16, torch.device("cpu"))


def dense_of(finished):
    return finished if isinstance(finished, torch.Tensor) else finished.to_dense()


@pytest.mark.parametrize("packed", [False, True])
def test_merged_rows_become_one_weight(packed):
    """As vLLM's loader of q, k and v does it, in another order than they lie in, and with a slice of each."""
    whole, held = [weight(128, seed=1), weight(64, seed=2), weight(64, seed=3)], arriving(128)
    for first, count, part in [(96, 32, whole[2]), (0, 64, whole[0]), (64, 32, whole[1])]:
        rows = PackedRows(PackedWeight.pack(part)) if packed else part
        held.data.narrow(0, first, count).copy_(rows.narrow(0, 0, count))
    finished = held.finish("qkv_proj")
    assert torch.equal(finished.to_dense(), torch.cat([whole[0][:64], whole[1][:32], whole[2][:32]]))


@pytest.mark.parametrize("packed", [False, True])
def test_what_is_not_smaller_packed_stays_dense_unless_a_neighbor_is_packed(packed):
    dense, sparse = weight(64, share=0), weight(64, seed=1)
    for other, kind in [(dense, torch.Tensor), (sparse, PackedWeight)]:
        held = arriving(128)
        for first, rows in [(0, dense), (64, other)]:
            held.narrow(0, first, 64).copy_(PackedRows(PackedWeight.pack(rows)) if packed else rows)
        finished = held.finish("gate_up_proj")
        assert isinstance(finished, kind)
        assert torch.equal(dense_of(finished), torch.cat([dense, other]))


@pytest.mark.parametrize("source", [weight(256), PackedRows(PackedWeight.pack(weight(256))), weight(256, share=0)])
@pytest.mark.parametrize("dim", [0, 1])
def test_a_slice_arrives_and_keeps_no_more_in_memory_than_itself(source, dim):
    """Rows or, as of o_proj for one of several processes, columns."""
    held = arriving(*((64, 64) if dim == 0 else (256, 20)))
    held.copy_(source.narrow(dim, 4, held.shape[dim]))
    finished = held.finish("o_proj")
    tensors = [finished] if isinstance(finished, torch.Tensor) else finished.tensors()
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in tensors)
    whole = source.packed.to_dense() if isinstance(source, PackedRows) else source
    assert torch.equal(dense_of(finished), whole.narrow(dim, 4, held.shape[dim]))


def test_packed_rows_are_copied_to_ordinary_parameters():
    """As of a packed head, which vLLM holds dense."""
    table, rows = torch.zeros(128, 64).bfloat16(), weight(100)
    table[:100].data.copy_(PackedRows(PackedWeight.pack(rows)).narrow(0, 0, 100))
    assert torch.equal(table[:100], rows) and not table[100:].any()


def test_missing_rows_and_other_shapes_raise():
    held = arriving(128)
    held.narrow(0, 0, 64).copy_(weight(64))
    message = "layers.0.qkv_proj got 64 rows of its weight: expected 128. The checkpoint lacks"
    with pytest.raises(ValueError, match=message):
        held.finish("layers.0.qkv_proj")
    with pytest.raises(ValueError, match=r"has \[64, 32\] elements of a weight: expected \[128, 64\]"):
        held.copy_(weight(64, 32))
    with pytest.raises(ValueError, match="narrowed along dimension 1: expected 0"):
        held.narrow(1, 0, 32)
