"""A sparse weight as kernels on GPUs read it: the columns of kept elements, in a byte each."""

import functools
import os
from dataclasses import dataclass, replace
from importlib import import_module
from types import ModuleType

import torch

from ..common.notes import get_logger
from ..model.change import PackedMask, row_stride
from ..native.library import TORCH, VARIABLE
from .packed_weight import INTEGERS, PackedWeight, unpack_bits
from .sparse_matrix import SCRATCH_ROWS, SparseMatrix, row_blocks


logger = get_logger(__name__)

TRITON_DEVICES = ("cuda", "xpu")  # torch calls AMD's "cuda" too
GROUP = 32  # slots
SPAN = 256  # columns
BLOCK = 2**22  # elements of a weight that are converted at a time, each of which takes about 50 bytes
MAX_FUSED_ROWS = 8  # rows of x up to which kernels multiply groups; for more, blocks of the weight are made dense
SCRATCH = 2**23  # elements that are dense at a time: 16 MiB in bfloat16, which caches of large GPUs hold


@dataclass(frozen=True)
class GroupedWeight(SparseMatrix):
    """A sparse weight of shape (rows, in) whose kept elements are in groups of 32 slots.

    A row starts with a new group. A group also ends before a column that is 256 or more after its first. Unused
    slots have value 0 and index 0; a kept element has index 0 only in the first slot of its group. Values of 16 bits take
    24.5 bits per slot.

    Attributes:
        values (`torch.Tensor`): of the weight's dtype, shape (32 * groups,).
        index (`torch.Tensor`): uint8, shape (32 * groups,): the column, minus that of the group's first slot.
        base (`torch.Tensor`): shape (groups,): the column of the first slot, in int32, or for up to 65,536 columns as an
            unsigned number in int16.
        starts (`torch.Tensor`): int32, shape (rows + 1,): the first group of each row.
        shape (`tuple[int, int]`): of the dense weight.
    """

    values: torch.Tensor
    index: torch.Tensor
    base: torch.Tensor
    starts: torch.Tensor
    shape: tuple[int, ...]

    @classmethod
    def from_packed(cls, weight: PackedWeight) -> "GroupedWeight":
        """Return a checked weight in this layout, on its device."""
        rows, columns = weight.row_count, weight.shape[-1]
        blocks = list(row_blocks(rows, columns, BLOCK)) or [slice(0, 0)]
        values, index, base, counts = map(torch.cat, zip(*(_group_rows(weight, block) for block in blocks)))
        starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
        return cls(values, index, base, starts, (rows, columns))

    def packed(self) -> PackedWeight:
        """Return the weight as files hold it, the same bit for bit."""
        rows, columns = self.shape
        stride = row_stride(columns)
        kept = (self.index != 0).view(-1, GROUP)
        kept[:, 0] = True
        row = torch.repeat_interleave(self.starts.diff())[:, None].expand_as(kept)[kept]
        base = self.base.int() if self.base.dtype == torch.int32 else self.base.int() & 0xFFFF
        column = (base[:, None] + self.index.view(-1, GROUP))[kept]
        offsets = torch.searchsorted(row, torch.arange(rows + 1, device=self.device))
        mask = torch.empty(rows, stride, dtype=torch.uint8, device=self.device)
        for block in row_blocks(rows, columns, BLOCK):
            part = slice(*offsets[[block.start, block.stop]].tolist())
            bits = torch.zeros(block.stop - block.start, 8 * stride, dtype=torch.bool, device=self.device)
            bits[row[part] - block.start, column[part]] = True
            mask[block] = PackedMask.pack(bits).bits.view(len(bits), stride)
        return PackedWeight(mask, self.values[kept.flatten()], offsets, self.shape)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.values, self.index, self.base, self.starts

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if len(x) <= MAX_FUSED_ROWS:
            return find_kernels(self.device).multiply(self, x, bias)
        return self.multiply_by_blocks(
            x, bias, max(1, SCRATCH // max(1, self.shape[1]) // SCRATCH_ROWS) * SCRATCH_ROWS
        )

    def fill(self, rows: slice, dense: torch.Tensor) -> None:
        find_kernels(self.device).fill(self.window(rows.start, rows.stop), dense)

    def window(self, first: int, last: int) -> "GroupedWeight":
        """Return the rows from `first` up to `last` to compute with. They share all slots, so no number is read."""
        return replace(self, starts=self.starts[first : last + 1], shape=(last - first, self.shape[1]))


def _group_rows(weight: PackedWeight, rows: slice) -> tuple[torch.Tensor, ...]:
    """Return values, index and base of some rows, and the number of groups of each row."""
    columns = weight.shape[-1]
    bounds = weight.offsets[rows.start : rows.stop + 1]
    start, stop = bounds[[0, -1]].tolist()
    row, column = unpack_bits(weight.mask[rows], columns).nonzero(as_tuple=True)
    place = row * (columns + SPAN) + column  # no group reaches from one row into the next
    number = torch.arange(len(place) + 1, device=weight.device)
    # A group that starts at an element ends before this one.
    end = torch.minimum(number[:-1] + GROUP, torch.searchsorted(place, place + SPAN))
    end = torch.cat([end, number[-1:]])
    # Rows start groups, and so does each group's end. After each pass, `end` is twice as many groups ahead.
    starts = torch.zeros_like(number, dtype=torch.bool)
    starts[bounds - start] = True
    for _ in range((columns // GROUP + columns // SPAN + 2).bit_length()):
        starts[end[starts]] = True
        end = end[end]
    starts = starts[:-1]
    first = starts.nonzero().flatten()
    group = starts.cumsum(0) - 1
    slot = GROUP * group + number[:-1] - first[group]
    values = torch.zeros(GROUP * len(first), dtype=INTEGERS[weight.dtype.itemsize], device=weight.device)
    values[slot] = weight.values[start:stop].view(values.dtype)
    index = torch.zeros(len(values), dtype=torch.uint8, device=weight.device)
    index[slot] = (column - column[first][group]).to(torch.uint8)
    counts = torch.searchsorted(first, bounds - start).diff()
    base = column[first].to(torch.int16 if columns <= 2**16 else torch.int32)
    return values.view(weight.dtype), index, base, counts


@functools.cache
def find_kernels(device: torch.device) -> ModuleType | None:
    """Return the module with Triton kernels, or None with a warning if they don't work on a device."""
    has_kernels = device.type in TRITON_DEVICES
    if os.environ.get(VARIABLE) == TORCH or (not has_kernels and device.type in ("cpu", "meta")):
        return None
    reason = f"there are no kernels for {device.type}"
    if has_kernels:
        try:
            kernels = import_module(".triton_kernels", __package__)
            kernels.try_out(device)  # so that an error shows here and not in the middle of a model
            return kernels
        except ImportError as error:
            reason = f"they need Triton (pip install triton), which cannot be imported: {error}"
        except Exception as error:  # compilers, drivers and unknown devices raise many kinds
            reason = f"Triton does not work there: {type(error).__name__}: {error}"
    logger.warning(
        f"Packed weights on {device} run without kernels, which is slow: {reason}. torch makes every weight dense for "
        "each token. Call optimum_neuronal.densify(model) to compute with dense weights."
    )
    return None
