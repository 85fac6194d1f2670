"""Triton kernels that multiply with packed weights on GPUs, in the layout of the files.

A row's bits are words of 32. An element's value is found by counting the bits before it: in earlier words by a scan, and in
its own word under a mask. Imports triton.
"""

import torch
import triton
import triton.language as tl

from .packed_weight import INTEGERS, PackedWeight


WORDS = 16  # of a row that a program looks at together: 512 elements
UNPACKED = 4  # rows of a weight that a program unpacks


def multiply(weight: PackedWeight, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return `x @ W.T + bias` for a few rows of x, without unpacking W. As [`PackedWeight.linear`]."""
    y = x.new_empty(len(x), weight.row_count)
    if y.numel():
        count = triton.next_power_of_2(len(x))
        together = max(1, 4 // count)  # rows of the weight that share what is read of x
        packed = _words(weight.mask), weight.values, weight.offsets
        sizes = *x.shape, len(weight.mask), weight.mask.shape[1] // 4
        with torch.accelerator.device_index(x.device.index):
            _multiply[(triton.cdiv(len(weight.mask), together),)](x, *packed, bias, y, *sizes, count, together, WORDS)
    return y


def fill(weight: PackedWeight, dense: torch.Tensor) -> None:
    """Unpack a weight, or a window of one, into a tensor of its shape."""
    integers = INTEGERS[dense.element_size()]  # copied as integers, so that no bit of a NaN changes
    if dense.numel():
        packed = _words(weight.mask), weight.values.view(integers), weight.offsets
        sizes = len(dense), dense.shape[1], weight.mask.shape[1] // 4
        with torch.accelerator.device_index(dense.device.index):
            _unpack[(triton.cdiv(len(dense), UNPACKED),)](*packed, dense.view(integers), *sizes, UNPACKED, WORDS)


def _words(bits: torch.Tensor) -> torch.Tensor:
    """Return the bits as words, uint32, in one dimension. They are copied only if their address is not a multiple of 4."""
    return (bits.clone() if bits.data_ptr() % 4 else bits).view(-1).view(torch.uint32)


@triton.jit
def _count(words):
    """Return how many bits are set, by adding neighbors. Compilers recognize this code and emit one instruction."""
    words = words - ((words >> 1) & 0x55555555)
    words = (words & 0x33333333) + ((words >> 2) & 0x33333333)
    words = (words + (words >> 4)) & 0x0F0F0F0F
    return ((words * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _find(bits, row, inside, first, words, WORDS: tl.constexpr):
    """Return which elements of WORDS words are kept, where each one's value is, (row, WORDS, 32), and the counts, (row,)."""
    word = first + tl.arange(0, WORDS)
    there = inside[:, None] & (word < words)[None, :]
    part = tl.load(bits + (row[:, None] * words + word[None, :]), mask=there, other=0)
    counts = _count(part)
    before = tl.cumsum(counts, axis=1) - counts
    bit = (tl.zeros((32,), tl.uint32) + 1) << tl.arange(0, 32).to(tl.uint32)
    kept = (part[:, :, None] & bit[None, None, :]) != 0
    place = before[:, :, None] + _count(part[:, :, None] & (bit - 1)[None, None, :])
    return kept, place, tl.sum(counts, axis=1)


@triton.jit
def _unpack(
    bits, values, offsets, dense, rows, columns, words, TOGETHER: tl.constexpr, WORDS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * TOGETHER + tl.arange(0, TOGETHER)
    inside = row < rows
    start = tl.load(offsets + row, mask=inside, other=0)
    for first in range(0, words, WORDS):
        kept, place, kept_count = _find(bits, row, inside, first, words, WORDS)
        value = tl.load(values + (start[:, None, None] + place), mask=kept, other=0)
        column = (first + tl.arange(0, WORDS))[:, None] * 32 + tl.arange(0, 32)[None, :]
        there = inside[:, None, None] & (column < columns)[None, :, :]
        tl.store(dense + (row[:, None, None] * columns + column[None, :, :]), value, mask=there)
        start += kept_count


@triton.jit
def _multiply(
    x, bits, values, offsets, bias, y, count, columns, rows, words,
    COUNT: tl.constexpr, TOGETHER: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * TOGETHER + tl.arange(0, TOGETHER)
    inside = row < rows
    start = tl.load(offsets + row, mask=inside, other=0)
    which = tl.arange(0, COUNT).to(tl.int64)
    sums = tl.zeros((COUNT, TOGETHER, WORDS, 32), tl.float32)
    for first in range(0, words, WORDS):
        kept, place, kept_count = _find(bits, row, inside, first, words, WORDS)
        value = tl.load(values + (start[:, None, None] + place), mask=kept, other=0.0).to(tl.float32)
        column = (first + tl.arange(0, WORDS))[:, None] * 32 + tl.arange(0, 32)[None, :]
        there = (which < count)[:, None, None] & (column < columns)[None, :, :]
        of_x = tl.load(x + (which[:, None, None] * columns + column[None, :, :]), mask=there, other=0.0).to(tl.float32)
        sums += value[None, :, :, :] * of_x[:, None, :, :]
        start += kept_count
    total = tl.sum(tl.reshape(sums, (COUNT, TOGETHER, WORDS * 32)), axis=2)
    if bias is not None:
        total += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)[None, :]
    there = (which < count)[:, None] & inside[None, :]
    tl.store(y + (which[:, None] * rows + row[None, :]), total.to(y.dtype.element_ty), mask=there)
