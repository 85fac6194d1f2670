"""One sparse weight in packed form: a bitmask and the values that are kept. docs/format.md describes the files.

Kept is what has any bit set, so -0.0 and NaN survive and a weight comes back bit-equal. Errors are `ValueError`s that
do not name the tensor; readers of files add its name and the file's.
"""

import math
import zlib
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import torch

from ..native.library import SIZES, Kernel, find_kernel


MASK, VALUES = ".packed_mask", ".packed_values"  # what follows a weight's name in a file

MOST_DIMENSIONS = 8
ALIGNMENT = 64  # elements whose bits are a word
# Weights at a time, a multiple of 8: so few that what is read of them is still in the processor's cache when it is used,
# and so many that Python's own work for each piece does not count.
CHUNK = 2**18
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # bytes of a float -> its bits as a number


class Values(Protocol):
    """Kept values that are read piece by piece, in order: a tensor of one dimension, or a part of a file."""

    dtype: torch.dtype

    def __len__(self) -> int: ...

    def __getitem__(self, piece: slice) -> torch.Tensor: ...


def packed_bytes(numel: int, kept: int, itemsize: int) -> int:
    """Bytes that a weight takes in packed form: one bit for each of its `numel` elements, and the `kept` values."""
    return mask_length(numel) + kept * itemsize


def rows_bytes(shape: tuple[int, int], kept: int, itemsize: int) -> int:
    """Bytes that a matrix takes that is packed to be computed with: the same, but that bits of rows begin at words of 64.

    With them an offset of 8 bytes for each row, and one more.
    """
    rows, columns = shape
    return rows * row_stride(columns) + kept * itemsize + 8 * (rows + 1)


def row_stride(columns: int) -> int:
    """Bytes of the bits of a row of so many elements, rounded up to whole words."""
    return 8 * -(-columns // ALIGNMENT)


def mask_length(numel: int) -> int:
    """Bytes of the bitmask of a weight with `numel` elements."""
    return -(-numel // 8)


def saves_space(weight: torch.Tensor) -> bool:
    """Whether a tensor of a checkpoint is to be packed: a matrix, or a stack of them, with so many zeros that it pays."""
    if weight.ndim < 2 or not weight.is_floating_point():
        return False
    kept = sum(np.count_nonzero(bits) for bits in _pieces(weight))
    return packed_bytes(weight.numel(), kept, weight.element_size()) < weight.numel() * weight.element_size()


def pack(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Packs a weight of any shape and floating dtype, on any device.

    Returns:
        `tuple`, both on the CPU: the bitmask, uint8, shape (ceil(numel / 8),), element `i` in row-major order being
        bit `i % 8`, from the lowest, of byte `i // 8`, 1 where kept and 0 behind the end; and the kept values in the
        same order, shape (kept,), of the weight's dtype.
    """
    masks, values = [], []
    for bits in _pieces(weight):
        kept = bits != 0
        masks.append(np.packbits(kept, bitorder="little"))
        values.append(bits[np.flatnonzero(kept)])
    if not masks:
        return torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=weight.dtype)
    joined = torch.from_numpy(np.concatenate(values))
    return torch.from_numpy(np.concatenate(masks)), joined.view(weight.dtype)


def unpack(mask: torch.Tensor, values: Values, shape: Sequence[int]) -> torch.Tensor:
    """The weight that [`pack`] packed, bit-equal, on the CPU. Nothing large is allocated before everything is checked.

    Args:
        mask (`Tensor` of uint8, shape (ceil(numel / 8),)): the bitmask.
        values (`Tensor` of shape (kept,), or [`Values`]): the kept values; read from the first to the last, once.
        shape (`Sequence[int]`): of the weight.

    Raises:
        `ValueError`: the three disagree.
    """
    check_headers(shape, mask.shape, mask.dtype, (len(values),), values.dtype)
    numel = math.prod(shape)
    kernel = find_kernel() if values.dtype.itemsize in SIZES else None
    if kernel is not None:
        return _unpack_by_kernel(kernel, mask.contiguous(), values, numel).view(tuple(shape))
    bitmask = mask.numpy()
    check_mask(bitmask, numel, len(values))
    weight = torch.empty(numel, dtype=values.dtype)
    bits = weight.view(INTEGERS[weight.element_size()]).numpy()
    first = 0
    for start in range(0, numel, CHUNK):
        piece = bits[start : start + CHUNK]
        piece[:] = 0
        kept = _positions(bitmask, start, len(piece))
        piece[kept] = _as_bits(values[first : first + len(kept)])
        first += len(kept)
    return weight.view(tuple(shape))


def _unpack_by_kernel(kernel: Kernel, mask: torch.Tensor, values: Values, numel: int) -> torch.Tensor:
    """`unpack` by compiled code."""
    check_mask(mask.numpy(), numel, len(values), kernel.library.count_bits(mask))
    weight = torch.empty(numel, dtype=values.dtype)
    first = 0
    for start in range(0, numel, CHUNK):
        piece = weight[start : start + CHUNK]
        bits = mask[start // 8 : mask_length(start + len(piece))]
        count = kernel.library.count_bits(bits)
        if not kernel.unpack_flat(bits, values[first : first + count].contiguous(), piece):
            raise ValueError(f"its bitmask keeps {count} values of a piece for which others are stored")
        first += count
    return weight


def check_headers(
    shape: Sequence[int],
    mask_shape: Sequence[int],
    mask_dtype: torch.dtype,
    values_shape: Sequence[int],
    values_dtype: torch.dtype,
) -> None:
    """What the headers of a file tell before a byte of a weight is read. Raises `ValueError` if they do not agree."""
    check_mask_header(shape, mask_shape, mask_dtype)
    numel = math.prod(shape)
    if not values_dtype.is_floating_point:
        raise ValueError(f"its values have dtype {values_dtype}: expected a floating one")
    if len(values_shape) != 1 or values_shape[0] > numel:
        raise ValueError(
            f"its values have shape {list(values_shape)}: expected one dimension of at most {numel} for a weight of "
            f"shape {list(shape)}"
        )


def check_mask_header(shape: Sequence[int], mask_shape: Sequence[int], mask_dtype: torch.dtype) -> None:
    """Raises `ValueError` if these are no shape of a weight, or if its bitmask is not one of it."""
    whole = isinstance(shape, Sequence) and all(type(size) is int and size >= 0 for size in shape)
    if not whole or not 2 <= len(shape) <= MOST_DIMENSIONS:
        raise ValueError(f"its shape is {shape!r}: expected a list of 2 to {MOST_DIMENSIONS} whole numbers")
    numel = math.prod(shape)
    if mask_dtype != torch.uint8 or tuple(mask_shape) != (mask_length(numel),):
        raise ValueError(
            f"its bitmask has dtype {mask_dtype} and shape {list(mask_shape)}: expected torch.uint8 and "
            f"[{mask_length(numel)}] for a weight of shape {list(shape)}"
        )


def check_mask(mask: np.ndarray, numel: int, kept: int, found: int | None = None) -> None:
    """Raises `ValueError` if the bitmask does not have exactly `kept` bits set, or one behind its end.

    `found` is how many it has, where that is known.
    """
    check_mask_end(mask, numel)
    if found is None:
        pieces = (mask[start : start + CHUNK] for start in range(0, len(mask), CHUNK))
        found = sum(np.count_nonzero(np.unpackbits(piece)) for piece in pieces)
    if found != kept:
        raise ValueError(f"its bitmask keeps {found} values, but {kept} are stored")


def check_mask_end(mask: np.ndarray | torch.Tensor, numel: int) -> None:
    """Raises `ValueError` if the bitmask has a bit set behind its end."""
    if numel % 8 and int(mask[-1]) >> numel % 8:
        raise ValueError(f"its bitmask has bits set behind the weight's {numel} elements")


def checksum_seed(name: str, dtype: str, shape: Sequence[int]) -> int:
    """CRC-32 of what the header says of a tensor, on which the checksum of its bytes goes on (`zlib.crc32(bytes, seed)`).

    Args:
        name (`str`): of the tensor, or of the weight that is packed.
        dtype (`str`): as safetensors writes it: `"BF16"`.
        shape (`Sequence[int]`): of the tensor; of a packed weight, unpacked.
    """
    return zlib.crc32(f"{name} {dtype} {'x'.join(map(str, shape))}".encode())


def _pieces(weight: torch.Tensor) -> Iterator[np.ndarray]:
    """The bits of the elements in row-major order, as numbers, some at a time."""
    flat = weight.detach().contiguous().view(-1)
    for start in range(0, len(flat), CHUNK):
        yield _as_bits(flat[start : start + CHUNK].cpu())


def _as_bits(values: torch.Tensor) -> np.ndarray:
    return values.view(INTEGERS[values.element_size()]).numpy()


def _positions(mask: np.ndarray, start: int, length: int) -> np.ndarray:
    """Indices, from `start` on, of the elements that are kept."""
    bits = np.unpackbits(mask[start // 8 : mask_length(start + length)], bitorder="little", count=length)
    return np.flatnonzero(bits.view(np.bool_))  # four times as fast as of numbers
