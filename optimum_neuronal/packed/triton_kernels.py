"""Triton kernels that multiply with sparse weights on GPUs, in the layout of [`GroupedWeight`]. Imports triton.

A program takes a row of the weight. `python -m benchmarks.gpu_kernels --count` counts their instructions.
"""

import torch
import triton
import triton.language as tl

from .grouped_weight import GroupedWeight
from .packed_weight import INTEGERS, PackedWeight


MOST_SLOTS = 1024  # of a row that a program takes at a time: 8 for each thread
# Neighboring slots that a thread loads at once, for one row of x and for several. More slots take fewer instructions, but
# then the columns that a warp reads are farther apart.
WIDTH, WIDTH_OF_MANY = 4, 8


def multiply(weight: GroupedWeight, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return `x @ W.T + bias` for 1 to 8 rows of x, without a dense copy of W."""
    y = x.new_empty(len(x), weight.row_count)
    count = 1 if len(x) == 1 else 4 if len(x) <= 4 else 8
    if count > 1:
        x = _neighbors(x, count)
    width = WIDTH if count == 1 else WIDTH_OF_MANY
    _launch(_multiply, weight, 1, x, *_tensors(weight), bias, None, y, *y.shape, 0, 0, count, width)
    return y


def multiply_experts(weight: GroupedWeight, x: torch.Tensor, chosen: torch.Tensor, experts: int) -> torch.Tensor:
    """Return each row of x times the rows of its expert: shape (len(x), rows / experts). Without an expert it is 0."""
    y = x.new_empty(len(x), weight.row_count // experts)
    arguments = None, chosen, y, *y.shape, experts, x.shape[1], 1, WIDTH
    _launch(_multiply, weight.window(0, y.shape[1]), len(x), x, *_tensors(weight), *arguments)
    return y


def fill(weight: GroupedWeight, dense: torch.Tensor) -> None:
    """Copy a weight, or a window of one, into a dense tensor of its shape."""
    values, *others = _tensors(weight)
    integers = INTEGERS[dense.element_size()]  # copied as integers, so that no bit of a NaN changes
    dense.zero_()
    _launch(_fill, weight, 1, values.view(integers), *others, dense.view(integers), dense.shape[1], WIDTH_OF_MANY)


def try_out(device: torch.device) -> None:
    """Run a kernel on the smallest weight. Raise what compilers and drivers do if kernels don't work on the device."""
    dense = torch.zeros(1, 1, device=device)
    fill(GroupedWeight.from_packed(PackedWeight.pack(dense)), dense)


def _tensors(weight: GroupedWeight) -> tuple[torch.Tensor, ...]:
    base = weight.base.view(torch.uint16) if weight.base.dtype == torch.int16 else weight.base
    return weight.values, weight.index, base, weight.starts


def _launch(kernel: triton.JITFunction, weight: GroupedWeight, times: int, *arguments) -> None:
    """Run a program for each row of a weight, `times` times."""
    rows, columns = weight.shape
    if rows and times:
        slots = max(256, min(MOST_SLOTS, triton.next_power_of_2(columns) // 2))
        with torch.accelerator.device_index(weight.device.index):
            kernel[(rows, times)](*arguments, slots, num_warps=slots // 256)


def _neighbors(x: torch.Tensor, count: int) -> torch.Tensor:
    """Return x (at most count, columns) as words of 64 bits, where the numbers of a column are neighbors.

    They lie in the order in which the kernel joins them: a number's place has the bits of its row in reverse.
    """
    x = torch.nn.functional.pad(x, (0, 0, 0, count - len(x)))
    x = x.view(*[2] * (count.bit_length() - 1), x.shape[1])
    return x.permute(*reversed(range(x.ndim))).contiguous().view(-1).view(torch.int64)


@triton.jit
def _find(values, index, base, starts, row, inside):
    """Return pointers to a row's values, index and base, and the number of its groups."""
    start = tl.load(starts + row, mask=inside, other=0)
    groups = tl.load(starts + row + 1, mask=inside, other=0) - start
    start = start.to(tl.int64)
    return values + start * 32, index + start * 32, base + start, groups


@triton.jit
def _split(words, TYPE: tl.constexpr):
    """Return the numbers in words of 64 bits, as float32, in the last dimensions: 2 of 32 bits, or 2 x 2 of 16."""
    if TYPE.primitive_bitwidth == 32:
        numbers = tl.join(words.to(tl.int32).to(TYPE, bitcast=True), (words >> 32).to(tl.int32).to(TYPE, bitcast=True))
    else:
        numbers = tl.join(_halves(words.to(tl.int32), TYPE), _halves((words >> 32).to(tl.int32), TYPE))
    return numbers


@triton.jit
def _halves(words, TYPE: tl.constexpr):
    if TYPE.is_bf16():  # the upper half of a float32
        low, high = (words << 16).to(tl.float32, bitcast=True), (words & -65536).to(tl.float32, bitcast=True)
    else:
        low, high = words.to(tl.int16).to(TYPE, bitcast=True), (words >> 16).to(tl.int16).to(TYPE, bitcast=True)
    return tl.join(low.to(tl.float32), high.to(tl.float32))


@triton.jit
def _load(x, FIRST: tl.constexpr, WORDS: tl.constexpr, TYPE: tl.constexpr):
    """Return the numbers in WORDS words after each pointer, in further dimensions of 2, the last one for the halves."""
    if WORDS == 1:
        numbers = _split(tl.load(x + FIRST), TYPE)
    else:
        numbers = tl.join(_load(x, FIRST, WORDS // 2, TYPE), _load(x, FIRST + WORDS // 2, WORDS // 2, TYPE))
    return numbers


@triton.jit
def _multiply(
    x, values, index, base, starts, bias, chosen, y, count, rows, experts, columns,
    COUNT: tl.constexpr, WIDTH: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    TYPE: tl.constexpr = values.dtype.element_ty
    WORDS: tl.constexpr = COUNT * TYPE.primitive_bitwidth // 64
    row, of_weight, inside = tl.program_id(0), tl.program_id(0), True
    if chosen is not None:
        which, count = tl.program_id(1), tl.num_programs(1)
        expert = tl.load(chosen + which)
        of_weight, inside = expert * rows + row, expert < experts
        x += which.to(tl.int64) * columns
        y += which.to(tl.int64) * rows
    values, index, base, groups = _find(values, index, base, starts, of_weight, inside)
    first = tl.arange(0, SLOTS // WIDTH)[:, None] * WIDTH
    slot, group = first + tl.arange(0, WIDTH)[None, :], first // 32
    total = tl.zeros((SLOTS // WIDTH, WIDTH if COUNT == 1 else COUNT), tl.float32)
    for left in range(groups, 0, -(SLOTS // 32)):
        there = group < left
        value = tl.load(values + slot, mask=there, other=0.0).to(tl.float32)
        column = tl.load(index + slot, mask=there, other=0)
        of_group = tl.load(base + group, mask=there, other=0).to(tl.int32)
        if COUNT == 1:
            total += value * tl.load(x + of_group + column).to(tl.float32)
        else:
            at = x + of_group * WORDS + column.to(tl.int32) * WORDS
            of_x = tl.reshape(_load(at, 0, WORDS, TYPE), (SLOTS // WIDTH, WIDTH, COUNT))
            total += tl.sum(value[:, :, None] * of_x, 1)
        values += SLOTS
        index += SLOTS
        base += SLOTS // 32
    sums = tl.sum(tl.sum(total, 1), 0)[None] if COUNT == 1 else tl.sum(total, 0)
    if bias is not None:
        sums += tl.load(bias + row).to(tl.float32)
    which = tl.arange(0, COUNT)
    tl.store(y + row + which.to(tl.int64) * rows, sums.to(y.dtype.element_ty), mask=which < count)


@triton.jit
def _fill(values, index, base, starts, dense, columns, WIDTH: tl.constexpr, SLOTS: tl.constexpr):
    values, index, base, groups = _find(values, index, base, starts, tl.program_id(0), True)
    dense += tl.program_id(0).to(tl.int64) * columns
    first = tl.arange(0, SLOTS // WIDTH)[:, None] * WIDTH
    slot, group = first + tl.arange(0, WIDTH)[None, :], first // 32
    for left in range(groups, 0, -(SLOTS // 32)):
        there = group < left
        column = tl.load(index + slot, mask=there, other=0)
        kept = there & ((column != 0) | (slot % 32 == 0))
        value = tl.load(values + slot, mask=there, other=0)
        of_group = tl.load(base + group, mask=there, other=0).to(tl.int32)
        tl.store(dense + of_group + column, value, mask=kept)
        values += SLOTS
        index += SLOTS
        base += SLOTS // 32
