"""What the layouts of a sparse weight share: its dense copy, and products by blocks of rows, so that temporaries stay small."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch


BLOCK = 2**20  # elements of a block, unless a caller says otherwise
SCRATCH_ROWS = 1024  # made dense at a time: enough for torch.mm to be as fast as on the whole matrix


def row_blocks(rows: int, columns: int, elements: int = BLOCK) -> Iterator[slice]:
    """Yield slices of rows that hold about `elements` elements each."""
    step = max(1, elements // max(1, columns))
    for start in range(0, rows, step):
        yield slice(start, min(rows, start + step))


class SparseMatrix(ABC):
    """A sparse weight of shape (..., in). All dimensions but the last count rows."""

    values: torch.Tensor
    shape: tuple[int, ...]  # of the dense weight

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return sum(part.nbytes for part in self.tensors())

    @property
    def row_count(self) -> int:
        return math.prod(self.shape[:-1])

    @abstractmethod
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return all tensors, as operations take them."""

    @abstractmethod
    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return `x @ W.T + bias`, for W (rows, in), x (count, in) and bias (rows,), which share dtype and device.

        x and bias must be contiguous. Sums are taken in float32, in a fixed order.
        """

    @abstractmethod
    def fill(self, rows: slice, dense: torch.Tensor) -> None:
        """Copy rows into a contiguous tensor of shape (rows of the slice, in)."""

    def to_dense(self) -> torch.Tensor:
        """Return the dense weight, of its shape and dtype, on its device."""
        dense = torch.empty(self.row_count, self.shape[-1], dtype=self.dtype, device=self.device)
        self.fill(slice(0, len(dense)), dense)
        return dense.view(self.shape)

    def multiply_by_blocks(self, x: torch.Tensor, bias: torch.Tensor | None, scratch_rows: int) -> torch.Tensor:
        """Compute [`multiply`] with `scratch_rows` rows of the weight at a time, dense."""
        columns = x.shape[1]
        y, scratch, wide = x.new_empty(len(x), self.row_count), None, None
        # torch multiplies float32 four times as fast as bfloat16 on processors that have AVX2 at most.
        widens = x.device.type == "cpu" and torch.backends.cpu.get_cpu_capability() == "AVX2"
        widened = x.float() if widens else x  # x itself if it is float32
        bias = None if bias is None else bias.to(widened.dtype)
        for block in row_blocks(self.row_count, columns, scratch_rows * columns):
            count = block.stop - block.start
            scratch = x.new_empty(count, columns) if scratch is None else scratch[:count]
            self.fill(block, scratch)
            if widened is x:
                weight, out = scratch, y[:, block]
            else:
                wide = scratch.float() if wide is None else wide[:count].copy_(scratch)
                weight, out = wide, widened.new_empty(len(x), count)
            if bias is None:
                torch.mm(widened, weight.t(), out=out)
            else:
                torch.addmm(bias[block], widened, weight.t(), out=out)
            if widened is not x:
                y[:, block] = out
        return y
