"""Multiplying with packed rows in plain torch, on any device: exact, and the measure for every kernel, but slow."""

import math
from collections.abc import Callable

import torch

from ..formats.bitmask import INTEGERS
from ..formats.code_stream import unpack_codes
from ..formats.coded import GROUP
from ..formats.scale_grid import widen
from ..native.library import bits_of_codes
from .activations import to_int8
from .bit_rows import multiply_unpacked, row_blocks, unpack_bits


SCRATCH = 2**20  # elements of a weight that are unpacked at a time: a few megabytes, which stay in a cache


def packed_linear(
    x: torch.Tensor, bits: torch.Tensor, values: torch.Tensor, offsets: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """`x @ W.T + bias`, W unpacked some rows at a time. For arguments and result see `inference.ops`."""
    columns = x.shape[-1]
    flat = x.reshape(math.prod(x.shape[:-1]), columns)  # -1 would not do for no columns

    def unpack(block: slice) -> torch.Tensor:
        return unpack_rows(bits[block], values, offsets[block.start : block.stop + 1], columns)

    y = multiply_unpacked(flat, len(bits), bias, SCRATCH, unpack)
    return y.view(*x.shape[:-1], len(bits))


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
    """`x @ W.T + bias` of codes, some rows at a time; with `int8` the same to the bit as every kernel."""
    columns = x.shape[-1]
    flat = x.reshape(math.prod(x.shape[:-1]), columns)
    multiply = _by_int8(flat) if int8 else _by_floats(flat)
    y = x.new_empty(len(flat), len(bits))
    for block in row_blocks(len(bits), columns, SCRATCH):
        found = _levels(bits[block], codes, offsets[block.start : block.stop + 1], table, columns)
        sums = multiply(found.float(), _scales(scales[block]))
        y[:, block] = (sums if bias is None else sums + bias[block].float()).to(x.dtype)
    return y.view(*x.shape[:-1], len(bits))


def unpack_coded(
    bits: torch.Tensor,
    codes: torch.Tensor,
    offsets: torch.Tensor,
    scales: torch.Tensor,
    table: torch.Tensor,
    columns: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The dense rows of codes, shape (rows, columns), of a dtype. `bits`, `offsets` and `scales` may be of some rows."""
    dense = torch.empty(len(bits), columns, dtype=dtype, device=bits.device)
    for block in row_blocks(len(bits), columns, SCRATCH):
        found = _levels(bits[block], codes, offsets[block.start : block.stop + 1], table, columns)
        dense[block] = _scaled(found.float(), _scales(scales[block])).to(dtype)
    return dense


def int8_linear(
    x: torch.Tensor, levels: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, int8: bool
) -> torch.Tensor:
    """`x @ W.T + bias` of a dense matrix in 8 bits, some rows at a time; with `int8` the same to the bit as every kernel."""
    multiply = _by_int8(x) if int8 else _by_floats(x)
    y = x.new_empty(len(x), len(levels))
    for block in row_blocks(len(levels), x.shape[1], SCRATCH):
        sums = multiply(levels[block].float(), _scales(scales[block]))
        y[:, block] = (sums if bias is None else sums + bias[block].float()).to(x.dtype)
    return y


def unpack_int8(levels: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The dense matrix of 8-bit levels, of a dtype."""
    dense = torch.empty(levels.shape, dtype=dtype, device=levels.device)
    for block in row_blocks(*levels.shape, SCRATCH):
        dense[block] = _scaled(levels[block].float(), _scales(scales[block])).to(dtype)
    return dense


def _levels(bits, codes, offsets, table, columns: int) -> torch.Tensor:
    """The levels of some rows: int8, shape (rows, columns), 0 where nothing is kept."""
    kept = unpack_bits(bits, columns)
    levels = torch.zeros(kept.shape, dtype=torch.int8, device=bits.device)
    found = unpack_codes(codes[int(offsets[0]) : int(offsets[-1])], kept, bits_of_codes(table))
    levels[kept] = table[found.int()] if len(table) else found.view(torch.int8)
    return levels


def _scales(scales: torch.Tensor) -> torch.Tensor:
    return widen(scales).float()


def _scaled(levels: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return levels * scales.repeat_interleave(GROUP, 1)[:, : levels.shape[1]]


def _by_floats(x: torch.Tensor) -> Callable:
    wide = x.float()
    return lambda levels, scales: wide @ _scaled(levels, scales).T


def _by_int8(x: torch.Tensor) -> Callable:
    """Sums of products of whole numbers, which float32 holds exactly, then of groups in the order of all kernels."""
    numbers, x_scales = to_int8(x)
    numbers = numbers.transpose(0, 1)

    def multiply(levels: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        groups = torch.nn.functional.pad(levels, (0, -levels.shape[1] % GROUP)).view(len(levels), -1, GROUP)
        sums = torch.bmm(numbers, groups.permute(1, 2, 0))
        terms = (scales.T[:, None, :] * x_scales.T[:, :, None]) * sums
        lanes = torch.zeros(8, *terms.shape[1:], device=terms.device)
        for first in range(0, len(terms), 8):
            part = terms[first : first + 8]
            lanes[: len(part)] += part
        halves = lanes[:4] + lanes[4:]
        return (halves[0] + halves[2]) + (halves[1] + halves[3])

    return multiply


def unpack_rows(bits: torch.Tensor, values: torch.Tensor, offsets: torch.Tensor, columns: int) -> torch.Tensor:
    """The dense rows, bit-equal, shape (rows, columns). `bits` and `offsets` may be those of some rows of a weight."""
    dense = values.new_zeros(len(bits), columns)
    if not dense.numel() or not len(values):
        return dense
    kept, integers = unpack_bits(bits, columns), INTEGERS[values.element_size()]
    source, target = values.view(integers), dense.view(integers)  # moved as numbers: no bit of a NaN is touched
    if values.device.type == "cpu":
        target.masked_scatter_(kept, source[int(offsets[0]) :])
    else:
        _spread(source, offsets, kept, target)
    return dense


def _spread(source: torch.Tensor, offsets: torch.Tensor, kept: torch.Tensor, target: torch.Tensor) -> None:
    """Fetches no number from the device, as a slice of `source` would, which waits for all that it has still to do."""
    places = kept.cumsum(1).add_(offsets[:-1, None] - 1).clamp_(min=0, max=len(source) - 1)
    target.copy_(source[places].masked_fill_(~kept, 0))
