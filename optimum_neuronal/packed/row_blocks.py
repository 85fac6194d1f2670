"""Matrices taken a block of rows at a time, so that temporaries stay small."""

from collections.abc import Callable, Iterator

import torch


BLOCK = 2**20  # elements of a block, unless a caller says otherwise
SCRATCH_ROWS = 1024  # unpacked at a time: enough for torch.mm to be as fast as on the whole matrix


def row_blocks(rows: int, columns: int, elements: int = BLOCK) -> Iterator[slice]:
    """Yield slices of rows that hold about `elements` elements each."""
    step = max(1, elements // max(1, columns))
    for start in range(0, rows, step):
        yield slice(start, min(rows, start + step))


def multiply_by_blocks(
    x: torch.Tensor,
    rows: int,
    bias: torch.Tensor | None,
    unpack: Callable[[slice, torch.Tensor], None],
    scratch_rows: int,
) -> torch.Tensor:
    """Return `x @ W.T + bias`, x (count, columns), bias (rows,). `unpack` fills a tensor with a slice of W's rows."""
    columns = x.shape[1]
    y, scratch, wide = x.new_empty(len(x), rows), None, None
    # torch multiplies float32 four times as fast as bfloat16 on processors that have AVX2 at most.
    widens = x.device.type == "cpu" and torch.backends.cpu.get_cpu_capability() == "AVX2"
    widened = x.float() if widens else x  # x itself if it is float32
    bias = None if bias is None else bias.to(widened.dtype)
    for block in row_blocks(rows, columns, scratch_rows * columns):
        count = block.stop - block.start
        scratch = x.new_empty(count, columns) if scratch is None else scratch[:count]
        unpack(block, scratch)
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
