"""Rows of a weight as vLLM's loaders bring them: kept packed, and joined when all are there. Nothing here imports vLLM.

vLLM merges projections, pads vocabularies and gives each process its slice, by narrowing a parameter and copying into it.
[`ArrivingRows`] stands for the parameter: what is copied to it stays as it came.
"""

from dataclasses import dataclass, field

import torch

from ..packed.formats.packed_matrix import DTYPES, PackedMatrix
from ..packed.formats.sparse import SparseWeight
from ..packed.ops import unpack
from ..packed.sparsify import pack_weight


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


@dataclass
class ArrivingWeight:
    """A weight of which some rows have arrived."""

    shape: tuple[int, int]  # of the whole weight
    dtype: torch.dtype
    device: torch.device
    packs_sparse: bool  # True: pack rows with many zeros. False: only quantized rows stay packed.
    parts: dict[int, PackedMatrix | torch.Tensor] = field(default_factory=dict)  # number of the first row -> rows
    padding: int = 0  # rows at the end that no checkpoint has

    def take(self, first: int, rows: torch.Tensor) -> None:
        """Keep rows, packed if that is smaller."""
        self.parts[first] = self._held(rows)

    def finish(self, name: str) -> list[PackedMatrix] | torch.Tensor:
        """Return all rows but the padding, in as few matrices as possible; one dense tensor if no row is packed.

        Raise `ValueError` if some rows have not arrived.
        """
        count, expected = sum(part.shape[0] for part in self.parts.values()), self.shape[0] - self.padding
        if count != expected:
            raise ValueError(
                f"{name} got {count} rows of its weight: expected {expected}. The checkpoint lacks a weight: download or save it "
                "again."
            )
        parts = [self.parts[start] for start in sorted(self.parts)]
        if all(isinstance(part, torch.Tensor) for part in parts):
            return parts[0] if len(parts) == 1 else torch.cat(parts)
        groups: list[list[PackedMatrix]] = []
        for part in parts:
            matrix = SparseWeight.pack(part) if isinstance(part, torch.Tensor) else part
            if groups and type(groups[-1][0]) is type(matrix) and groups[-1][0].joins(matrix):
                groups[-1].append(matrix)
            else:
                groups.append([matrix])
        return [type(group[0]).joined(group) if len(group) > 1 else group[0] for group in groups]

    def _held(self, rows: torch.Tensor) -> PackedMatrix | torch.Tensor:
        if isinstance(rows, PackedRows):
            is_smaller = rows.matrix.nbytes < rows.numel() * self.dtype.itemsize
            if not isinstance(rows.matrix, SparseWeight) or self.packs_sparse and is_smaller:
                return _owned(rows.matrix.to(self.device, self.dtype))
            rows = rows.matrix.unpack()
        dense = _own(rows.detach().to(self.device, self.dtype))
        packed = pack_weight(dense) if self.packs_sparse and dense.dtype in DTYPES else None
        return dense if packed is None else packed


class ArrivingRows:
    """Some rows of an [`ArrivingWeight`], with the interface of a parameter that vLLM's loaders narrow and copy to."""

    output_dim, input_dim = 0, 1

    def __init__(self, weight: ArrivingWeight, first: int = 0, count: int | None = None):
        self.weight, self.first = weight, first
        self.shape = torch.Size((weight.shape[0] if count is None else count, weight.shape[1]))
        self.dtype, self.device = weight.dtype, weight.device

    @property
    def data(self) -> "ArrivingRows":
        """Return itself, as a parameter's `data`."""
        return self

    def size(self) -> torch.Size:
        return self.shape

    def narrow(self, dim: int, start: int, length: int) -> "ArrivingRows":
        """Return some of the rows. Raise `ValueError` for columns: vLLM's loaders narrow those in the loaded tensor."""
        if dim != 0:
            raise ValueError(f"a packed weight is narrowed along dimension {dim}: expected 0, its rows")
        return ArrivingRows(self.weight, self.first + start, length)

    def __getitem__(self, rows: slice) -> "ArrivingRows":
        start, stop, _ = rows.indices(self.shape[0])
        return self.narrow(0, start, max(0, stop - start))

    def copy_(self, rows: torch.Tensor) -> None:
        """Keep rows. Raise `ValueError` if they have another shape."""
        if rows.shape != self.shape:
            raise ValueError(
                f"the checkpoint has {list(rows.shape)} elements of a weight: expected {list(self.shape)}"
            )
        self.weight.take(self.first, rows)

    def fill_(self, value: float) -> None:
        """Treat the last rows as padding."""
        self.weight.padding = self.shape[0]


def _owned(matrix: PackedMatrix) -> PackedMatrix:
    """Return a matrix whose tensors are not parts of larger ones in memory."""
    tensors = {name: _own(tensor) for name, tensor in matrix.tensors().items()}
    return type(matrix).of_tensors(tensors, matrix.shape, matrix.dtype)


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor with memory of its own: a copy of a part of another, or of a mapped file."""
    whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if whole else tensor.clone(memory_format=torch.contiguous_format)
