"""Multiplying with quantized weights on GPUs, by Triton, in the layout of the files.

A program computes 32 rows. Of bit planes, these are the rows of 16 neighboring bytes: 16 in the low halves, and 16 in the
high halves, 32 rows further. Inputs are not rounded, so results are close to the CPU's but not bit-equal. Imports triton.
"""

import torch
import triton
import triton.language as tl

from .formats.quantized import QuantizedWeight


ROWS = 32  # of a weight that a program computes
COLUMNS = 128  # that a program looks at together; of several rows of x fewer


def multiply(weight: QuantizedWeight, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return `x @ W.T + bias` for a few rows of x, without unpacking W. As [`PackedMatrix.linear`]."""
    y = x.new_empty(len(x), weight.row_count)
    if y.numel():
        count = triton.next_power_of_2(len(x))
        parts = weight.codes, weight.scales, weight.steps
        with torch.accelerator.device_index(x.device.index):
            _multiply[_programs(weight)](
                x, *parts, bias, y, *x.shape, weight.row_count, weight.bits, count, ROWS, COLUMNS // count
            )
    return y


def fill(weight: QuantizedWeight, dense: torch.Tensor) -> None:
    """Unpack a weight into a tensor of shape (rows, columns), each element rounded once."""
    if dense.numel():
        with torch.accelerator.device_index(dense.device.index):
            _unpack[_programs(weight)](
                weight.codes, weight.scales, weight.steps, dense, *dense.shape, weight.bits, ROWS, COLUMNS
            )


def _programs(weight: QuantizedWeight) -> tuple[int]:
    """Return how many programs compute a weight: of bit planes an even number, as blocks have 64 rows."""
    return (triton.cdiv(weight.row_count, ROWS) if weight.bits == 8 else 2 * len(weight.codes),)


@triton.jit
def _row_numbers(BITS: tl.constexpr, ROWS: tl.constexpr):
    """The rows of a program: int64, shape (ROWS,)."""
    program, place = tl.program_id(0).to(tl.int64), tl.arange(0, ROWS)
    if BITS == 8:
        return program * ROWS + place
    half = ROWS // 2
    return program // 2 * (2 * ROWS) + program % 2 * half + place // half * ROWS + place % half


@triton.jit
def _levels(codes, row, first, rows, columns, BITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The levels of a program's rows in COLUMNS columns from `first` on: float32, shape (COLUMNS, ROWS), any behind the end."""
    if BITS == 8:
        column = first + tl.arange(0, COLUMNS)
        there = (column < columns)[:, None] & (row < rows)[None, :]
        return tl.load(codes + (row[None, :] * columns + column[:, None]), mask=there, other=0).to(tl.float32)
    GROUPS: tl.constexpr = COLUMNS // 4
    program, groups = tl.program_id(0).to(tl.int64), (columns + 3) // 4
    group = first // 4 + tl.arange(0, GROUPS)
    byte = program % 2 * (ROWS // 2) + tl.arange(0, ROWS // 2)
    place = (program // 2 * groups + group)[:, None] * (BITS * 32) + byte[None, :]
    shift = tl.arange(0, 4)[:, None] + 4 * tl.arange(0, 2)[None, :]  # of a column in a half
    code = tl.zeros((GROUPS, 4, 2, ROWS // 2), tl.int32)
    for bit in tl.static_range(BITS):
        plane = tl.load(codes + (place + bit * 32), mask=(group < groups)[:, None], other=0).to(tl.int32)
        code += ((plane[:, None, None, :] >> shift[None, :, :, None]) & 1) << bit
    return (2 * tl.reshape(code, (COLUMNS, ROWS)) - ((1 << BITS) - 1)).to(tl.float32)


@triton.jit
def _unpack(
    codes, scales, steps, dense, rows, columns, BITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    row = _row_numbers(BITS, ROWS)
    scale = tl.load(scales + row, mask=row < rows, other=0.0).to(tl.float32)
    for first in range(0, columns, COLUMNS):
        level = _levels(codes, row, first, rows, columns, BITS, ROWS, COLUMNS)
        column = (first + tl.arange(0, COLUMNS)).to(tl.int64)
        factor = tl.zeros((COLUMNS, ROWS), tl.float32) + scale[None, :]
        if steps is not None:
            factor *= tl.load(steps + column, mask=column < columns, other=0.0).to(tl.float32)[:, None]
        value = level * factor + 0.0  # no -0 of a scale of 0
        there = (column < columns)[:, None] & (row < rows)[None, :]
        tl.store(dense + (row[None, :] * columns + column[:, None]), value.to(dense.dtype.element_ty), mask=there)


@triton.jit
def _multiply(
    x, codes, scales, steps, bias, y, count, columns, rows,
    BITS: tl.constexpr, COUNT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row, which = _row_numbers(BITS, ROWS), tl.arange(0, COUNT).to(tl.int64)
    sums = tl.zeros((COUNT, COLUMNS, ROWS), tl.float32)
    for first in range(0, columns, COLUMNS):
        level = _levels(codes, row, first, rows, columns, BITS, ROWS, COLUMNS)
        column = (first + tl.arange(0, COLUMNS)).to(tl.int64)
        there = (which < count)[:, None] & (column < columns)[None, :]
        of_x = tl.load(x + (which[:, None] * columns + column[None, :]), mask=there, other=0.0).to(tl.float32)
        if steps is not None:
            of_x *= tl.load(steps + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
        sums += level[None, :, :] * of_x[:, :, None]
    inside = row < rows
    total = tl.sum(sums, axis=1) * tl.load(scales + row, mask=inside, other=0.0).to(tl.float32)[None, :]
    if bias is not None:
        total += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)[None, :]
    there = (which < count)[:, None] & inside[None, :]
    tl.store(y + (which[:, None] * rows + row[None, :]), total.to(y.dtype.element_ty), mask=there)
