"""Packed rows that look like a dense tensor: what moves whole rows about keeps them packed, all else unpacks them.

transformers renames, splits, stacks and joins tensors between a checkpoint's files and a model (experts one by one in
the one, all in one parameter in the other). Given these in place of dense tensors, it does so without unpacking.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch

from ..formats.coded import CodedWeight
from ..formats.int8_weight import Int8Weight
from ..formats.packed import PackedMask, PackedWeight
from ..formats.stand_in import StandIn
from .coded_rows import ACTIVATIONS, CodedRows
from .int8_rows import Int8Rows
from .layouts import Rows, lay_out
from .packed_rows import PackedRows


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
        rows ([`PackedRows`], [`CodedRows`] or [`Int8Rows`]): all of its rows, shape (number of rows, in); shared, not copied.
        shape (`Sequence[int]`): of the tensor.
        transposed (`bool`): whether the rows run along the last dimension but one, so that the shape is (..., in, out).
    """

    rows: Rows
    transposed: bool

    @staticmethod
    def __new__(cls, rows: Rows, shape: Sequence[int], transposed: bool = False):
        return torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=rows.dtype, device=rows.device)

    def __init__(self, rows: Rows, shape: Sequence[int], transposed: bool = False):
        self.rows, self.transposed = rows, transposed

    @classmethod
    def of(
        cls,
        packed: PackedWeight | CodedWeight | Int8Weight,
        transposed: bool = False,
        activations: str = ACTIVATIONS[0],
    ) -> "PackedTensor":
        """Of a packed weight of at least two dimensions.

        Args:
            packed ([`PackedWeight`], [`CodedWeight`] or [`Int8Weight`]): the weight.
            transposed (`bool`): whether it holds the tensor with its last two dimensions swapped.
            activations (`str`): what inputs become that meet codes.

        Raises:
            `ValueError`: its parts disagree.
        """
        shape = tuple(packed.shape)
        if isinstance(packed, Int8Weight):
            return cls(lay_out(packed, activations), shape)
        flat = replace(packed, mask=PackedMask(packed.mask.bits, (math.prod(shape[:-1]), shape[-1])))
        rows = lay_out(flat, activations)
        return cls(rows, (*shape[:-2], shape[-1], shape[-2]) if transposed else shape, transposed)

    def unpack(self) -> torch.Tensor:
        dense = self.rows.unpack()
        if not self.transposed:
            return dense.view(self.shape)
        return dense.view(*self.shape[:-2], self.shape[-1], self.shape[-2]).mT.clone(
            memory_format=torch.contiguous_format
        )

    def packed(self) -> PackedWeight | None:
        packed = self.rows.to_packed() if isinstance(self.rows, PackedRows) and not self.transposed else None
        return packed and replace(packed, mask=PackedMask(packed.mask.bits, tuple(self.shape)))

    def coded(self) -> tuple[CodedWeight, bool] | None:
        if not isinstance(self.rows, CodedRows):
            return None
        shape = (*self.shape[:-2], self.shape[-1], self.shape[-2]) if self.transposed else tuple(self.shape)
        coded = self.rows.to_packed()
        return replace(coded, mask=PackedMask(coded.mask.bits, shape)), self.transposed

    def int8(self) -> Int8Weight | None:
        whole = isinstance(self.rows, Int8Rows) and not self.transposed and tuple(self.shape) == self.rows.shape
        return self.rows.to_packed() if whole else None

    def __repr__(self, **_) -> str:
        return f"PackedTensor(shape={list(self.shape)}, dtype={self.dtype}, kept={self.rows.kept})"

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in SAME:
            return cls(args[0].rows, args[0].shape, args[0].transposed)
        if function is aten._to_copy.default and kwargs.get("dtype", args[0].dtype).is_floating_point:
            rows = args[0].rows.converted(kwargs.get("device"), kwargs.get("dtype"))
            return cls(rows, args[0].shape, args[0].transposed)
        if function is aten.squeeze.default and args[0].shape[-1] != 1 and not args[0].transposed:
            return cls(args[0].rows, [size for size in args[0].shape if size != 1])
        if function in ROW_MOVES and not kwargs:
            moved = _move(function, args)
            if moved is not None:
                return moved
        return function(*_unpacked(args), **{name: _unpacked([value])[0] for name, value in kwargs.items()})


def _move(function, args: Sequence) -> "PackedTensor | list[PackedTensor] | None":
    """The result of a function that moves rows, found by moving their numbers. None if it does not move whole rows."""
    sources = list(args[0]) if isinstance(args[0], (list, tuple)) else [args[0]]
    ndim = sources[0].ndim + (function in ONE_MORE)
    position = ROW_MOVES[function]
    dim = args[position] if len(args) > position else 0
    whole = all(isinstance(source, PackedTensor) and not source.transposed for source in sources)
    if not whole or dim % ndim == ndim - 1:
        return None
    first = sources[0].rows
    if not all(type(source.rows) is type(first) and first.joins(source.rows) for source in sources):
        return None
    ends = [0, *accumulate(source.rows.shape[0] for source in sources)]
    numbers = [torch.arange(*ends[i : i + 2]).view(source.shape[:-1]) for i, source in enumerate(sources)]
    one = isinstance(args[0], torch.Tensor)
    moved = function(numbers[0] if one else numbers, *args[1:position], dim % ndim, *args[position + 1 :])
    rows = [source.rows for source in sources]
    if isinstance(moved, torch.Tensor):
        return _gathered(rows, ends, moved)
    return [_gathered(rows, ends, numbers) for numbers in moved]


def _gathered(sources: list[Rows], ends: list[int], numbers: torch.Tensor) -> PackedTensor:
    """A tensor of the rows of these numbers, counted through all sources, which begin and end at `ends`."""
    flat = numbers.flatten()
    bounds = [0, *(flat.diff() != 1).nonzero().flatten().add(1).tolist(), len(flat)]
    parts = []
    for first, last in zip(bounds, bounds[1:]):  # between them numbers follow each other
        start = int(flat[first]) if first < last else 0
        stop = start + last - first
        for source, begin, end in zip(sources, ends, ends[1:]):
            if begin < stop and start < end:
                parts.append(source.part(max(start, begin) - begin, min(stop, end) - begin))
    return PackedTensor(
        type(sources[0]).joined(parts or [sources[0].part(0, 0)]), (*numbers.shape, sources[0].shape[1])
    )


def _unpacked(values: Sequence) -> list:
    """Arguments of a function with dense tensors in the place of packed ones, in lists too."""
    return [
        value.unpack() if isinstance(value, PackedTensor)
        else type(value)(_unpacked(value)) if isinstance(value, (list, tuple))
        else value
        for value in values
    ]  # fmt: skip
