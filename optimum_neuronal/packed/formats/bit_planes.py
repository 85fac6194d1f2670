"""Codes of 2 to 7 bits as files and kernels hold them: in bit planes, in blocks of 64 rows and groups of 4 columns.

`planes[block, group, bit, i]` is a byte. Its low half holds one bit of four codes: of row `64 * block + i` in the group's
columns, the first in the lowest bit; its high half the same of row `64 * block + 32 + i`. Zeros fill the last ones up.
"""

import torch

from .packed_matrix import BLOCK_ROWS, row_blocks


GROUP_COLUMNS, PLANE_BYTES = 4, 32


def planes_shape(rows: int, columns: int, bits: int) -> tuple[int, int, int, int]:
    """Return the shape of the planes of a matrix."""
    return -(-rows // BLOCK_ROWS), -(-columns // GROUP_COLUMNS), bits, PLANE_BYTES


def encode_planes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the planes of codes: uint8, shape (rows, columns), below 2**bits."""
    rows, columns = codes.shape
    planes = codes.new_empty(planes_shape(rows, columns, bits))
    for chunk in row_blocks(rows, columns):
        part = codes[chunk]
        part = torch.nn.functional.pad(part, (0, -columns % GROUP_COLUMNS, 0, -len(part) % BLOCK_ROWS))
        part = part.view(-1, 2, PLANE_BYTES, planes.shape[1], GROUP_COLUMNS)
        blocks = slice(chunk.start // BLOCK_ROWS, chunk.start // BLOCK_ROWS + len(part))
        for bit in range(bits):
            fours = (part >> bit) & 1
            halves = fours[..., 0] | fours[..., 1] << 1 | fours[..., 2] << 2 | fours[..., 3] << 3
            planes[blocks, :, bit] = (halves[:, 0] | halves[:, 1] << 4).transpose(1, 2)
    return planes


def decode_rows(planes: torch.Tensor, rows: torch.Tensor, columns: int) -> torch.Tensor:
    """Return the codes of some rows, uint8, shape (count, columns); `rows` are their numbers, int64, shape (count,)."""
    found = planes[rows // BLOCK_ROWS, :, :, rows % PLANE_BYTES]  # (count, groups, bits)
    halves = torch.where((rows % BLOCK_ROWS < PLANE_BYTES)[:, None, None], found & 15, found >> 4)
    codes = halves.new_zeros(*halves.shape[:2], GROUP_COLUMNS)
    for bit in range(planes.shape[2]):
        for column in range(GROUP_COLUMNS):
            codes[..., column] |= (halves[..., bit] >> column & 1) << bit
    return codes.flatten(1)[:, :columns]
