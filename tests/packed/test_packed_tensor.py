import torch
from torch import nn

from optimum_neuronal.packed.formats.quantized import QuantizedWeight
from optimum_neuronal.packed.formats.sparse import SparseWeight
from optimum_neuronal.packed.packed_tensor import PackedTensor


def sparse(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(*shape, generator=generator)
    weight[torch.rand(*shape, generator=generator) < 0.7] = 0
    return weight


def packed(weight):
    return PackedTensor.of(SparseWeight.pack(weight))


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def dense(result):
    results = result if isinstance(result, (list, tuple)) else [result]
    return [r.unpack() if isinstance(r, PackedTensor) else r for r in results]


A, B = sparse(6, 10, 33), sparse(6, 10, 33, seed=1)


def test_rows_are_moved_packed():
    for move in [
        lambda a, b: torch.stack([a, b]),
        lambda a, b: torch.stack([a, b], dim=1),
        lambda a, b: torch.cat([a, b, a]),
        lambda a, b: torch.cat([a, b], dim=1),
        lambda a, b: torch.chunk(a, 2, dim=1),
        lambda a, b: a.unbind(0),
        lambda a, b: a[3],
        lambda a, b: a[1:4],
        lambda a, b: a[:, 2:9],
        lambda a, b: torch.split(a, [1, 2, 3]),
        lambda a, b: torch.cat(torch.chunk(torch.cat([a, b], dim=-2), 2, dim=-2)),
        lambda a, b: a.clone(),
        lambda a, b: a.detach(),
        lambda a, b: a.to(torch.bfloat16),
        lambda a, b: a[3].contiguous(),
        lambda a, b: a[4, 5:7],
        lambda a, b: a[2:3].squeeze(),
        lambda a, b: a[2:3].squeeze(0),
        lambda a, b: a.squeeze(1),
        lambda a, b: a.unsqueeze(0),
        lambda a, b: a.unsqueeze(-2),
    ]:
        found, expected = move(packed(A), packed(B)), move(A, B)
        parts = found if isinstance(found, (list, tuple)) else [found]
        assert all(isinstance(part, PackedTensor) for part in parts)
        for one, other in zip(dense(found), dense(expected), strict=True):
            assert one.dtype == other.dtype and torch.equal(bits(one), bits(other))
        for part in parts:
            part.matrix.check()


def test_all_else_unpacks():
    for work in [
        lambda a, b: a + b,
        lambda a, b: torch.cat([a, b], dim=2),
        lambda a, b: a.transpose(0, 1),
        lambda a, b: a[:, :, 3],
        lambda a, b: torch.stack([a, b], dim=-1),
        lambda a, b: a.sum(),
        lambda a, b: a.to(torch.int32),
        lambda a, b: torch.cat([a, torch.ones(6, 10, 33)]),
        lambda a, b: a.view(60, 33),
        lambda a, b: a.reshape(6, 5, 2, 33).transpose(1, 2).reshape(6, 10, 33).contiguous(),
    ]:
        found, expected = work(packed(A), packed(B)), work(A, B)
        assert type(found) is torch.Tensor and torch.equal(found, expected)


def test_parts_share_what_they_hold():
    whole = packed(A)
    part = whole[2]
    assert part.matrix.bits.untyped_storage().data_ptr() == whole.matrix.bits.untyped_storage().data_ptr()
    assert part.matrix.values.untyped_storage().data_ptr() == whole.matrix.values.untyped_storage().data_ptr()


def test_a_parameter():
    parameter = nn.Parameter(packed(A))
    assert isinstance(parameter, nn.Parameter) and parameter.shape == A.shape and not parameter.is_meta
    assert torch.equal(parameter.unpack(), A) and "kept=" in repr(parameter)


def test_transposed():
    weight = sparse(3, 20, 33)
    tensor = PackedTensor(SparseWeight.pack(weight.mT.reshape(99, 20)), weight.shape, transposed=True)
    assert torch.equal(tensor.unpack(), weight)
    stored, swapped = tensor.stored()
    assert swapped and stored.shape == (3, 33, 20) and torch.equal(stored.unpack(), weight.mT)
    assert torch.equal(tensor.clone().half().unpack(), weight.half())
    assert torch.equal(tensor[1], weight[1]) and torch.equal(torch.cat([tensor, tensor]), torch.cat([weight, weight]))


def test_as_files_hold_it():
    expected = SparseWeight.pack(A)
    found, swapped = packed(A).stored()
    assert not swapped and found.shape == expected.shape
    assert all(torch.equal(found.tensors()[name], part) for name, part in expected.tensors().items())


def test_quantised_weights_as_tensors():
    weight = QuantizedWeight.nearest(torch.randn(3, 64, 70), 3)
    tensor = PackedTensor.of(weight)
    dense = weight.unpack()
    assert torch.equal(tensor.unpack(), dense) and torch.equal(tensor[1:].stored()[0].unpack(), dense[1:])
    both = torch.cat([tensor, tensor.clone()])
    assert isinstance(both, PackedTensor) and torch.equal(both.unpack(), torch.cat([dense, dense]))
    other = PackedTensor.of(QuantizedWeight.nearest(dense, 4))
    assert type(torch.cat([tensor, other])) is torch.Tensor, "of other bits: not packed"
    swapped = PackedTensor.of(weight, transposed=True)
    assert swapped.shape == (3, 70, 64) and torch.equal(swapped.unpack(), dense.mT)


def test_nothing_kept_and_no_rows():
    nothing = packed(torch.zeros(4, 5))
    assert torch.equal(torch.cat([nothing, nothing]).unpack(), torch.zeros(8, 5))
    assert nothing[2:2].shape == (0, 5)
