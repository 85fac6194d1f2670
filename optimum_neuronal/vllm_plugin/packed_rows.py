"""A packed weight that vLLM's loaders can slice as they slice a dense one. Nothing here imports vLLM."""

import torch

from ..packed.formats.packed_matrix import PackedMatrix
from ..packed.ops import unpack


aten = torch.ops.aten
SAME = {aten.detach.default, aten.alias.default}


class PackedRows(torch.Tensor):
    """A tensor of shape (rows, columns) that stays packed when it is sliced, and is unpacked for anything else."""

    matrix: PackedMatrix

    @staticmethod
    def __new__(cls, matrix: PackedMatrix):
        return torch.Tensor._make_wrapper_subclass(cls, matrix.shape, dtype=matrix.dtype, device=matrix.device)

    def __init__(self, matrix: PackedMatrix):
        self.matrix = matrix

    def __repr__(self, **_) -> str:
        return f"PackedRows(shape={list(self.shape)}, dtype={self.dtype}, kept={self.matrix.kept})"

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function in SAME:
            return cls(args[0].matrix)
        if function is aten.slice.Tensor and (part := _slice(*args)) is not None:
            return cls(part)
        unpacked = [unpack(value.matrix) if isinstance(value, cls) else value for value in args]
        return function(*unpacked, **(kwargs or {}))


def _slice(
    source: PackedRows, dim: int = 0, start: int | None = None, stop: int | None = None, step: int = 1
) -> PackedMatrix | None:
    """Return a slice of rows or columns; None if the format cannot cut there."""
    first, last, _ = slice(start, stop).indices(source.shape[dim])
    if step != 1 or first >= last:
        return None
    cut = source.matrix.rows if dim % 2 == 0 else source.matrix.columns
    return cut(first, last)
