"""Rows of a weight as vLLM's loaders deliver them: kept packed, and joined once complete. Nothing here imports vLLM.

vLLM merges projections, and gives each process its slice, by narrowing a parameter and copying into it. [`ArrivingRows`]
stands for the parameter and keeps what is copied to it.
"""

import torch

from ..compat import hf_private
from ..packed.packed_weight import DTYPES, PackedWeight
from ..packed.sparsify import pack_weight


aten = torch.ops.aten
SAME = {aten.detach.default, aten.alias.default}


class PackedRows(torch.Tensor):
    """A tensor of shape (rows, columns) that stays packed when rows are sliced, and becomes dense for anything else."""

    packed: PackedWeight

    @staticmethod
    def __new__(cls, packed: PackedWeight):
        rows = hf_private.wrapper_tensor(cls, packed)
        rows.packed = packed
        return rows

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function in SAME:
            return cls(args[0].packed)
        if function is aten.slice.Tensor and (part := _slice_rows(*args)) is not None:
            return cls(part)
        dense = [value.packed.to_dense() if isinstance(value, cls) else value for value in args]
        return function(*dense, **(kwargs or {}))


def _slice_rows(
    source: PackedRows, dim: int = 0, start: int | None = None, stop: int | None = None, step: int = 1
) -> PackedWeight | None:
    """Return a slice of rows; None for columns, an empty slice or one with gaps."""
    first, last, _ = slice(start, stop).indices(source.shape[dim])
    return source.packed.rows(first, last) if dim % 2 == 0 and step == 1 and first < last else None


class ArrivingRows:
    """Rows of a weight that is being loaded, with the interface of a parameter that vLLM's loaders narrow and copy to.

    Args:
        shape (`tuple[int, int]`): of these rows.
        parts (`dict`, *optional*): number of the first row -> rows that have arrived, of the whole weight.
        first (`int`): the number of the first of these rows in the whole weight.
    """

    output_dim, input_dim = 0, 1

    def __init__(
        self,
        shape: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
        parts: dict[int, PackedWeight | torch.Tensor] | None = None,
        first: int = 0,
    ):
        self.shape, self.dtype, self.device = torch.Size(shape), dtype, device
        self.parts, self.first = {} if parts is None else parts, first

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
        return ArrivingRows((length, self.shape[1]), self.dtype, self.device, self.parts, self.first + start)

    def copy_(self, rows: torch.Tensor) -> None:
        """Keep rows, packed if that is smaller. Raise `ValueError` if they have another shape."""
        if rows.shape != self.shape:
            raise ValueError(
                f"the checkpoint has {list(rows.shape)} elements of a weight: expected {list(self.shape)}"
            )
        if isinstance(rows, PackedRows):
            if rows.packed.nbytes < rows.numel() * self.dtype.itemsize:
                packed = rows.packed.to(self.device, self.dtype)
                self.parts[self.first] = PackedWeight(*map(_copy_of_part, packed.tensors()), packed.shape)
                return
            rows = rows.packed.to_dense()
        dense = _copy_of_part(rows.detach().to(self.device, self.dtype))
        packed = pack_weight(dense) if dense.dtype in DTYPES else None
        self.parts[self.first] = dense if packed is None else packed

    def finish(self, name: str) -> PackedWeight | torch.Tensor:
        """Return the whole weight: packed if any rows are, else dense. Raise `ValueError` if rows have not arrived."""
        count = sum(part.shape[0] for part in self.parts.values())
        if count != self.shape[0]:
            raise ValueError(
                f"{name} got {count} rows of its weight: expected {self.shape[0]}. The checkpoint lacks a weight: download or "
                "save it again."
            )
        parts = [self.parts[start] for start in sorted(self.parts)]
        if all(isinstance(part, torch.Tensor) for part in parts):
            return torch.cat(parts) if len(parts) > 1 else parts[0]
        packed = [PackedWeight.pack(part) if isinstance(part, torch.Tensor) else part for part in parts]
        return PackedWeight.joined(packed) if len(packed) > 1 else packed[0]


def _copy_of_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor that keeps no more in memory than itself: a copy if it is part of another or of a file."""
    whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if whole else tensor.clone(memory_format=torch.contiguous_format)
