"""Packed rows that look like a dense tensor: what moves whole rows about keeps them packed, all else unpacks them.

transformers renames, splits, stacks and joins tensors between a checkpoint's files and a model (experts one by one in
the one, all in one parameter in the other). Given these in place of dense tensors, it does so without unpacking.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch

from .formats.packed_matrix import PackedMatrix, swapped
from .formats.stand_in import StandIn
from .ops import unpack


aten = torch.ops.aten
SAME = {aten.detach.default, aten.alias.default, aten.clone.default}
# What picks or joins slices along one dimension -> where that dimension is among its arguments.
ROW_MOVES = {
    aten.slice.Tensor: 1,
    aten.select.int: 1,
    aten.unbind.int: 1,
    aten.split.Tensor: 2,
    aten.split_with_sizes.default: 2,
    aten.stack.default: 1,
    aten.cat.default: 1,
    aten.squeeze.dim: 1,
    aten.unsqueeze.default: 1,
}
ONE_MORE = {aten.stack.default, aten.unsqueeze.default}  # their results have a dimension more


class PackedTensor(StandIn):
    """A tensor of shape (..., in) whose rows are packed, in row-major order.

    Args:
        matrix ([`PackedMatrix`]): all of its rows, shape (number of rows, in); shared, not copied.
        shape (`Sequence[int]`): of the tensor.
        transposed (`bool`): True if the rows run along the last dimension but one, so that the shape is (..., in, out).
    """

    matrix: PackedMatrix
    transposed: bool

    @staticmethod
    def __new__(cls, matrix: PackedMatrix, shape: Sequence[int], transposed: bool = False):
        return torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=matrix.dtype, device=matrix.device)

    def __init__(self, matrix: PackedMatrix, shape: Sequence[int], transposed: bool = False):
        self.matrix, self.transposed = matrix, transposed

    @classmethod
    def of(cls, weight: PackedMatrix, transposed: bool = False) -> "PackedTensor":
        """Return the tensor of a packed weight, which holds it with its last two dimensions swapped if `transposed`."""
        flat = replace(weight, shape=(weight.row_count, weight.shape[-1]))
        return cls(flat, swapped(weight.shape, transposed), transposed)

    def unpack(self) -> torch.Tensor:
        dense = unpack(self.matrix).view(swapped(self.shape, self.transposed))
        return dense.mT.clone(memory_format=torch.contiguous_format) if self.transposed else dense

    def stored(self) -> tuple[PackedMatrix, bool]:
        return replace(self.matrix, shape=swapped(self.shape, self.transposed)), self.transposed

    def __repr__(self, **_) -> str:
        return f"PackedTensor(shape={list(self.shape)}, dtype={self.dtype}, kept={self.matrix.kept})"

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in SAME:
            return cls(args[0].matrix, args[0].shape, args[0].transposed)
        if function is aten._to_copy.default and kwargs.get("dtype", args[0].dtype).is_floating_point:
            matrix = args[0].matrix.to(kwargs.get("device"), kwargs.get("dtype"))
            return cls(matrix, args[0].shape, args[0].transposed)
        if function is aten.squeeze.default and args[0].shape[-1] != 1 and not args[0].transposed:
            return cls(args[0].matrix, [size for size in args[0].shape if size != 1])
        if function in ROW_MOVES and not kwargs:
            moved = _cut(*args) if function is aten.slice.Tensor else None
            moved = _move(function, args) if moved is None else moved
            if moved is not None:
                return moved
        return function(*_unpacked(args), **{name: _unpacked([value])[0] for name, value in kwargs.items()})


def _cut(
    source: "PackedTensor", dim: int = 0, start: int | None = None, stop: int | None = None, step: int = 1
) -> "PackedTensor | None":
    """Return columns of a matrix. None if others than columns are meant, or if the format cannot cut there."""
    if source.ndim != 2 or dim % 2 != 1 or source.transposed or step != 1:
        return None
    first, last, _ = slice(start, stop).indices(source.shape[1])
    matrix = source.matrix.columns(first, last) if first < last else None
    return None if matrix is None else PackedTensor(matrix, (source.shape[0], last - first))


def _move(function, args: Sequence) -> "PackedTensor | list[PackedTensor] | None":
    """Return the result of a function that moves rows, found by moving their numbers. None if it does not move whole rows."""
    sources = list(args[0]) if isinstance(args[0], (list, tuple)) else [args[0]]
    ndim = sources[0].ndim + (function in ONE_MORE)
    position = ROW_MOVES[function]
    dim = args[position] if len(args) > position else 0
    whole = all(isinstance(source, PackedTensor) and not source.transposed for source in sources)
    if not whole or dim % ndim == ndim - 1:
        return None
    first = sources[0].matrix
    if not all(type(source.matrix) is type(first) and first.joins(source.matrix) for source in sources):
        return None
    ends = [0, *accumulate(source.matrix.row_count for source in sources)]
    numbers = [torch.arange(*ends[i : i + 2]).view(source.shape[:-1]) for i, source in enumerate(sources)]
    one = isinstance(args[0], torch.Tensor)
    moved = function(numbers[0] if one else numbers, *args[1:position], dim % ndim, *args[position + 1 :])
    matrices = [source.matrix for source in sources]
    if isinstance(moved, torch.Tensor):
        return _gathered(matrices, ends, moved)
    return [_gathered(matrices, ends, numbers) for numbers in moved]


def _gathered(sources: list[PackedMatrix], ends: list[int], numbers: torch.Tensor) -> PackedTensor:
    """Return a tensor of the rows of these numbers, counted through all sources, which begin and end at `ends`."""
    flat = numbers.flatten()
    bounds = [0, *(flat.diff() != 1).nonzero().flatten().add(1).tolist(), len(flat)]
    parts = []
    for first, last in zip(bounds, bounds[1:]):  # between them numbers follow each other
        start = int(flat[first]) if first < last else 0
        stop = start + last - first
        for source, begin, end in zip(sources, ends, ends[1:]):
            if begin < stop and start < end:
                parts.append(source.rows(max(start, begin) - begin, min(stop, end) - begin))
    return PackedTensor(
        type(sources[0]).joined(parts or [sources[0].rows(0, 0)]), (*numbers.shape, sources[0].shape[1])
    )


def _unpacked(values: Sequence) -> list:
    """Return arguments of a function with dense tensors in the place of packed ones, in lists too."""
    return [
        value.unpack() if isinstance(value, PackedTensor)
        else type(value)(_unpacked(value)) if isinstance(value, (list, tuple))
        else value
        for value in values
    ]  # fmt: skip
