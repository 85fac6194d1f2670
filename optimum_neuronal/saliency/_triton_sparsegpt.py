"""SparseGPT's loop over the columns of a block as one Triton kernel. Imports triton."""

import torch
import triton
import triton.language as tl


TILE = 2048  # weights that a program holds in registers: 16 rows of 128 columns


def prune_block(weight: torch.Tensor, inverse: torch.Tensor, scale: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Prune and update columns in place, and return their errors: `sparsegpt.prune_block`, up to rounding.

    All tensors are contiguous.
    """
    errors = torch.empty_like(weight)
    width = triton.next_power_of_2(weight.shape[1])
    rows = max(1, TILE // width)
    tensors = weight, mask.view(torch.uint8), inverse, scale.reciprocal(), errors
    with torch.accelerator.device_index(weight.device.index):
        _prune[(triton.cdiv(len(weight), rows),)](*tensors, *weight.shape, rows, width)
    return errors


@triton.jit
def _prune(weight, mask, inverse, factor, errors, rows, columns, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    place = row[:, None] * columns + column[None, :]
    there = (row < rows)[:, None] & (column < columns)[None, :]
    values = tl.load(weight + place, mask=there, other=0.0)
    pruned = tl.load(mask + place, mask=there, other=1) == 0
    error = tl.zeros((ROWS, WIDTH), tl.float32)
    for index in range(columns):
        here = (column == index)[None, :]
        chosen = tl.sum(tl.where(here & pruned, values, 0.0), axis=1) * tl.load(factor + index)
        later = tl.load(inverse + index * columns + column, mask=(column > index) & (column < columns), other=0.0)
        values -= chosen[:, None] * later[None, :]
        error = tl.where(here, chosen[:, None], error)
    tl.store(errors + place, error, mask=there)
    tl.store(weight + place, tl.where(pruned, 0.0, values), mask=there)
