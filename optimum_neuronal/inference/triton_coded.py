"""Multiplying with values of few bits on GPUs, by Triton: every element finds its code by counting bits, as in
`triton_kernels`, and looks its level up."""

import math

import torch
import triton
import triton.language as tl

from ..formats.scale_grid import SHORT_BASE, SHORT_SHIFT
from ..native.library import bits_of_codes
from .activations import to_int8
from .bit_rows import multiply_unpacked
from .triton_kernels import MAX_FUSED_ROWS, SCRATCH, UNPACKED, _count, _words


WORDS = 8  # of 64 elements of a row that a program looks at together
BASE, SHIFT = tl.constexpr(SHORT_BASE), tl.constexpr(SHORT_SHIFT)


def coded_linear(
    x: torch.Tensor,
    bits: torch.Tensor,
    codes: torch.Tensor,
    offsets: torch.Tensor,
    scales: torch.Tensor,
    table: torch.Tensor,
    bias: torch.Tensor | None,
    int8: bool,
) -> torch.Tensor:
    """`x @ W.T + bias`, up to `MAX_FUSED_ROWS` rows of x without unpacking W. For the rest see `inference.coded_ops`.

    Rounded inputs are multiplied as floats: close to what processors compute, not the same to the bit.
    """
    flat = x.reshape(math.prod(x.shape[:-1]), x.shape[-1]).contiguous()
    coded = bits, codes, offsets, scales, table
    if len(flat) > MAX_FUSED_ROWS:
        return _by_blocks(flat, *coded, bias).view(*x.shape[:-1], len(bits))
    if int8:
        numbers, x_scales = to_int8(flat)
        flat = (numbers * x_scales[..., None]).flatten(1)[:, : x.shape[-1]].contiguous()
    return _fused(flat, *coded, bias, x.dtype).view(*x.shape[:-1], len(bits))


def unpack_coded(
    bits: torch.Tensor,
    codes: torch.Tensor,
    offsets: torch.Tensor,
    scales: torch.Tensor,
    table: torch.Tensor,
    columns: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The dense rows, shape (rows, columns), of a dtype. `bits`, `offsets` and `scales` may be those of some rows."""
    dense = torch.empty(len(bits), columns, dtype=dtype, device=bits.device)
    if dense.numel():
        sizes = len(bits), columns, bits.shape[1] // 8
        with torch.accelerator.device_index(bits.device.index):
            _unpack[(triton.cdiv(len(bits), UNPACKED),)](
                _words(bits), codes, offsets, scales, table, dense, *sizes, bits_of_codes(table), UNPACKED, WORDS
            )
    return dense


def _fused(x, bits, codes, offsets, scales, table, bias, dtype: torch.dtype):
    y = torch.empty(len(x), len(bits), dtype=dtype, device=x.device)
    if y.numel():
        count = triton.next_power_of_2(len(x))
        together = max(1, 4 // count)  # rows of the weight that share what is read of x
        sizes = *x.shape, len(bits), bits.shape[1] // 8
        with torch.accelerator.device_index(x.device.index):
            _multiply[(triton.cdiv(len(bits), together),)](
                x, _words(bits), codes, offsets, scales, table, bias, y, *sizes, bits_of_codes(table), count, together,
                WORDS,
            )  # fmt: skip
    return y


def _by_blocks(x, bits, codes, offsets, scales, table, bias):
    def unpack(block: slice) -> torch.Tensor:
        rows = bits[block], codes, offsets[block.start : block.stop + 1], scales[block], table
        return unpack_coded(*rows, x.shape[1], x.dtype)

    return multiply_unpacked(x, len(bits), bias, SCRATCH, unpack)


@triton.jit
def _levels(bits, codes, start, row, inside, first, words, table, BITS: tl.constexpr, WORDS: tl.constexpr):
    """Levels of WORDS words of 64 elements from word `first` on, as floats, 0 where nothing is kept: shape (row, WORDS, 2,
    32); and how many bytes their codes take, shape (row,). `start` is where these begin."""
    word = (first + tl.arange(0, WORDS))[:, None] * 2 + tl.arange(0, 2)[None, :]
    there = inside[:, None, None] & (word < 2 * words)[None, :, :]
    part = tl.load(bits + (row[:, None, None] * (2 * words) + word[None, :, :]), mask=there, other=0)
    counts = _count(part)
    taken = (tl.sum(counts, axis=2) * BITS + 7) >> 3
    begin = start[:, None] + (tl.cumsum(taken, axis=1) - taken)
    bit = (tl.zeros((32,), tl.uint32) + 1) << tl.arange(0, 32).to(tl.uint32)
    kept = (part[:, :, :, None] & bit) != 0
    before = (tl.cumsum(counts, axis=2) - counts)[:, :, :, None] + _count(part[:, :, :, None] & (bit - 1))
    place = before * BITS
    byte = begin[:, :, None, None] + (place >> 3)
    code = tl.load(codes + byte, mask=kept, other=0).to(tl.int32) >> (place & 7)
    if BITS == 8:
        level = code - ((code >> 7) << 8)
    else:
        across = kept & ((place & 7) + BITS > 8)
        code |= tl.load(codes + (byte + 1), mask=across, other=0).to(tl.int32) << (8 - (place & 7))
        level = tl.load(table + (code & ((1 << BITS) - 1)).to(tl.int64), mask=kept, other=0)
    return tl.where(kept, level.to(tl.float32), 0.0), tl.sum(taken, axis=1)


@triton.jit
def _scales(scales, row, inside, first, groups, WORDS: tl.constexpr):
    """The scales of WORDS words of 64 elements from word `first` on: shape (row, WORDS). A group is two words."""
    group = (first + tl.arange(0, WORDS)) // 2
    there = inside[:, None] & (group < groups)[None, :]
    found = tl.load(scales + (row[:, None] * groups + group[None, :]), mask=there, other=0).to(tl.int32)
    if scales.dtype.element_ty == tl.uint8:
        found = tl.where(found == 0, 0, (found + BASE) << SHIFT)
    return (found << 16).to(tl.float32, bitcast=True)


@triton.jit
def _columns(first, WORDS: tl.constexpr):
    """The columns of WORDS words of 64 elements: shape (WORDS, 2, 32)."""
    word = (first + tl.arange(0, WORDS))[:, None, None] * 64
    return word + tl.arange(0, 2)[None, :, None] * 32 + tl.arange(0, 32)[None, None, :]


@triton.jit
def _unpack(
    bits, codes, offsets, scales, table, dense, rows, columns, words,
    BITS: tl.constexpr, TOGETHER: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * TOGETHER + tl.arange(0, TOGETHER)
    inside = row < rows
    start = tl.load(offsets + row, mask=inside, other=0)
    groups = (words + 1) // 2
    for first in range(0, words, WORDS):
        level, taken = _levels(bits, codes, start, row, inside, first, words, table, BITS, WORDS)
        value = level * _scales(scales, row, inside, first, groups, WORDS)[:, :, None, None]
        column = _columns(first, WORDS)
        there = inside[:, None, None, None] & (column < columns)[None, :, :, :]
        where = dense + (row[:, None, None, None] * columns + column[None, :, :, :])
        tl.store(where, value.to(dense.dtype.element_ty), mask=there)
        start += taken


@triton.jit
def _multiply(
    x, bits, codes, offsets, scales, table, bias, y, count, columns, rows, words,
    BITS: tl.constexpr, COUNT: tl.constexpr, TOGETHER: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * TOGETHER + tl.arange(0, TOGETHER)
    inside = row < rows
    start = tl.load(offsets + row, mask=inside, other=0)
    groups = (words + 1) // 2
    which = tl.arange(0, COUNT).to(tl.int64)
    sums = tl.zeros((COUNT, TOGETHER, WORDS * 64), tl.float32)
    for first in range(0, words, WORDS):
        level, taken = _levels(bits, codes, start, row, inside, first, words, table, BITS, WORDS)
        value = level * _scales(scales, row, inside, first, groups, WORDS)[:, :, None, None]
        column = tl.reshape(_columns(first, WORDS), (WORDS * 64,))
        there = (which < count)[:, None] & (column < columns)[None, :]
        of_x = tl.load(x + (which[:, None] * columns + column[None, :]), mask=there, other=0.0).to(tl.float32)
        sums += tl.reshape(value, (TOGETHER, WORDS * 64))[None, :, :] * of_x[:, None, :]
        start += taken
    total = tl.sum(sums, axis=2)
    if bias is not None:
        total += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)[None, :]
    there = (which < count)[:, None] & inside[None, :]
    tl.store(y + (which[:, None] * rows + row[None, :]), total.to(y.dtype.element_ty), mask=there)
