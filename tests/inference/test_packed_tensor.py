import torch
from torch import nn

from optimum_neuronal.formats.packed import PackedWeight
from optimum_neuronal.inference.packed_rows import PackedRows
from optimum_neuronal.inference.packed_tensor import PackedTensor


def sparse(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(*shape, generator=generator)
    weight[torch.rand(*shape, generator=generator) < 0.7] = 0
    return weight


def packed(weight):
    return PackedTensor.of(PackedWeight.pack(weight))


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
            part.rows.check()


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
    assert part.rows.bits.untyped_storage().data_ptr() == whole.rows.bits.untyped_storage().data_ptr()
    assert part.rows.values.untyped_storage().data_ptr() == whole.rows.values.untyped_storage().data_ptr()


def test_a_parameter():
    parameter = nn.Parameter(packed(A))
    assert isinstance(parameter, nn.Parameter) and parameter.shape == A.shape and not parameter.is_meta
    assert torch.equal(parameter.unpack(), A) and "kept=" in repr(parameter)


def test_transposed():
    weight = sparse(3, 20, 33)
    rows = PackedRows.of(PackedWeight.pack(weight.mT.reshape(99, 20)))
    tensor = PackedTensor(rows, weight.shape, transposed=True)
    assert torch.equal(tensor.unpack(), weight) and tensor.packed() is None
    assert torch.equal(tensor.clone().half().unpack(), weight.half())
    assert torch.equal(tensor[1], weight[1]) and torch.equal(torch.cat([tensor, tensor]), torch.cat([weight, weight]))


def test_as_files_hold_it():
    expected = PackedWeight.pack(A)
    found = packed(A).packed()
    assert found.shape == expected.shape and torch.equal(found.mask.bits, expected.mask.bits)
    assert torch.equal(found.values, expected.values)
    tiny = A.clone()
    tiny[0, 0, 0] = 1e-30
    assert packed(tiny).to(torch.float16).packed() is None, "a value has become zero"
    assert torch.equal(packed(tiny).half().unpack(), tiny.half())


def test_nothing_kept_and_no_rows():
    nothing = packed(torch.zeros(4, 5))
    assert torch.equal(torch.cat([nothing, nothing]).unpack(), torch.zeros(8, 5))
    assert nothing[2:2].shape == (0, 5)
