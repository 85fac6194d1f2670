"""Multiplying with packed rows in plain torch, on any device: exact, and the measure for every kernel, but slow."""

import math

import torch

from ..sparsity.bitmask import INTEGERS
from .packed_rows import row_blocks, unpack_bits


SCRATCH = 2**20  # elements of a weight that are unpacked at a time: a few megabytes, which stay in a cache


def packed_linear(
    x: torch.Tensor, bits: torch.Tensor, values: torch.Tensor, offsets: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """`x @ W.T + bias`, W unpacked some rows at a time. For arguments and result see `inference.ops`."""
    columns = x.shape[-1]
    flat = x.reshape(math.prod(x.shape[:-1]), columns)  # -1 would not do for no columns
    y = x.new_empty(len(flat), len(bits))
    for block in row_blocks(len(bits), columns, SCRATCH):
        weight = unpack_rows(bits[block], values, offsets[block.start : block.stop + 1], columns)
        y[:, block] = torch.nn.functional.linear(flat, weight, None if bias is None else bias[block])
    return y.view(*x.shape[:-1], len(bits))


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
