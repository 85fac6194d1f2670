"""Multiplying with packed rows in plain torch, on any device: exact, and the measure for every kernel, but slow."""

import torch

from ..sparsity.bitmask import INTEGERS
from .packed_rows import row_blocks, unpack_bits


SCRATCH = 2**20  # elements of a weight that are unpacked at a time: a few megabytes, which stay in a cache


def packed_linear(
    x: torch.Tensor, bits: torch.Tensor, values: torch.Tensor, offsets: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """`x @ W.T + bias`, W unpacked some rows at a time. For arguments and result see `inference.ops`."""
    columns = x.shape[-1]
    flat = x.reshape(-1, columns)
    y = x.new_empty(len(flat), len(bits))
    for block in row_blocks(len(bits), columns, SCRATCH):
        weight = unpack_rows(bits[block], values, offsets[block.start : block.stop + 1], columns)
        y[:, block] = torch.nn.functional.linear(flat, weight, None if bias is None else bias[block])
    return y.view(*x.shape[:-1], len(bits))


def unpack_rows(bits: torch.Tensor, values: torch.Tensor, offsets: torch.Tensor, columns: int) -> torch.Tensor:
    """The dense rows, bit-equal, shape (rows, columns). `bits` and `offsets` may be those of some rows of a weight."""
    dense = values.new_zeros(len(bits), columns)
    if not len(bits):
        return dense
    kept = values[int(offsets[0]) : int(offsets[-1])]
    integers = INTEGERS[values.element_size()]  # moved as numbers, so that no bit of a NaN is touched
    dense.view(integers).masked_scatter_(unpack_bits(bits, columns), kept.view(integers))
    return dense
