"""The bitmask of a weight as kernels read it: every row's bits begin at a multiple of 64."""

from collections.abc import Callable, Iterator

import torch

from ..formats.bitmask import ALIGNMENT, mask_length, row_stride
from ..formats.packed import PackedMask


BLOCK = 2**22  # elements of a weight that are looked at together, so that temporaries stay small


def align(mask: PackedMask, what: str) -> torch.Tensor:
    """The bits of a matrix's mask as rows of words, uint8, shape (rows, stride); shared if columns % 64 == 0.

    Args:
        mask ([`PackedMask`]): of a matrix.
        what (`str`): who asks, for the error.

    Raises:
        `ValueError`: it is no matrix's, or not as long as its shape says.
    """
    shape, bits = mask.shape, mask.bits
    if len(shape) != 2:
        raise ValueError(f"{what}: a matrix was expected, but the weight has shape {list(shape)}")
    if bits.dtype != torch.uint8 or bits.shape != (mask_length(shape[0] * shape[1]),):
        raise ValueError(
            f"its bitmask has dtype {bits.dtype} and shape {list(bits.shape)}: expected torch.uint8 and "
            f"[{mask_length(shape[0] * shape[1])}] for a weight of shape {list(shape)}"
        )
    stride = row_stride(shape[1])
    return bits.view(shape[0], stride) if shape[1] % ALIGNMENT == 0 else _aligned(mask, stride)


def close_up(bits: torch.Tensor, shape: tuple[int, int]) -> PackedMask:
    """The mask that [`align`] was given; its bits are shared if columns % 64 == 0."""
    rows, columns = shape
    if columns % ALIGNMENT == 0:
        return PackedMask(bits.view(-1), shape)
    kept = torch.empty(shape, dtype=torch.bool, device=bits.device)
    for block in row_blocks(rows, columns):
        kept[block] = unpack_bits(bits[block], columns)
    return PackedMask.pack(kept)


def check_tensors(tensors: dict[str, torch.Tensor], expected: dict[str, tuple], shape: tuple[int, int]) -> None:
    """Raises `ValueError` if the tensors of a weight are not of these dtypes and shapes, contiguous, on one device.

    Args:
        tensors (`dict[str, Tensor]`): by what they are called.
        expected (`dict[str, tuple[dtype, tuple[int, ...]]]`): of some or all of them.
        shape (`tuple[int, int]`): of the weight.
    """
    name, first = next(iter(tensors.items()))
    for other, (dtype, sizes) in expected.items():
        tensor = tensors[other]
        if tensor.dtype != dtype or tensor.shape != sizes:
            raise ValueError(
                f"its {other} have dtype {tensor.dtype} and shape {list(tensor.shape)}: expected {dtype} and "
                f"{list(sizes)} for a weight of shape {list(shape)}"
            )
        if tensor.device != first.device:
            raise ValueError(f"its {other} lie on {tensor.device}, but its {name} on {first.device}")
        if not tensor.is_contiguous():
            raise ValueError(f"its {other} are not contiguous")


def check_offsets(
    bits: torch.Tensor, columns: int, offsets: torch.Tensor, counts: torch.Tensor, count: int, what: str
) -> None:
    """Raises `ValueError` if bits are set behind the columns, or offsets do not agree with what every row has.

    Args:
        bits, offsets (`Tensor`): of the weight.
        columns (`int`): of the weight.
        counts (`Tensor`): of every row how much of `what` its bits keep, int64.
        count (`int`): of `what` there are.
        what (`str`): `"values"`, or bytes of codes.
    """
    if len(bits) and has_bits_behind(bits, columns):
        raise ValueError(f"its bitmask has bits set behind a row's {columns} elements")
    first, last = int(offsets[0]), int(offsets[-1])
    if first != 0 or last != count:
        raise ValueError(f"its offsets go from {first} to {last}: expected 0 to {count}, its {what}")
    wrong = torch.nonzero(offsets.diff() != counts)
    if len(wrong):
        row = int(wrong[0])
        raise ValueError(
            f"its bitmask keeps {int(counts[row])} {what} of row {row}, but by its offsets there are "
            f"{int(offsets[row + 1] - offsets[row])}"
        )


def row_blocks(rows: int, columns: int, elements: int = BLOCK) -> Iterator[slice]:
    """Slices of rows that hold about `elements` elements each; all but the last a multiple of 8 rows."""
    step = max(8, elements // max(1, columns) // 8 * 8)
    for start in range(0, rows, step):
        yield slice(start, min(rows, start + step))


def multiply_unpacked(
    x: torch.Tensor, rows: int, bias: torch.Tensor | None, elements: int, unpack: Callable[[slice], torch.Tensor]
) -> torch.Tensor:
    """`x @ W.T + bias`, W unpacked some rows at a time.

    Args:
        x (`Tensor`): shape (count, columns).
        rows (`int`): of W.
        bias (`Tensor`, *optional*): shape (rows,).
        elements (`int`): of W that are unpacked at a time, about.
        unpack (`Callable`): what the rows of a slice are, shape (those, columns), of the dtype of x.
    """
    y = x.new_empty(len(x), rows)
    for block in row_blocks(rows, x.shape[1], elements):
        y[:, block] = torch.nn.functional.linear(x, unpack(block), None if bias is None else bias[block])
    return y


def unpack_bits(bits: torch.Tensor, columns: int) -> torch.Tensor:
    """Rows of bits, uint8, shape (rows, stride), as booleans of shape (rows, columns), True where kept."""
    return PackedMask(bits.reshape(-1), (len(bits), 8 * bits.shape[1])).unpack()[:, :columns]


def _aligned(mask: PackedMask, stride: int) -> torch.Tensor:
    """The bits of rows that begin anywhere, as rows of `stride` bytes."""
    rows, columns = mask.shape
    aligned = torch.zeros(rows, stride, dtype=torch.uint8, device=mask.bits.device)
    for block in row_blocks(rows, columns):  # multiples of 8 rows begin with a byte
        part = mask.bits[block.start * columns // 8 : mask_length(block.stop * columns)]
        kept = PackedMask(part, (block.stop - block.start, columns)).unpack()
        padded = torch.nn.functional.pad(kept, (0, 8 * stride - columns))
        aligned[block] = PackedMask.pack(padded).bits.view(-1, stride)
    return aligned


def row_counts(bits: torch.Tensor) -> torch.Tensor:
    """How many bits are set in every row: int64, shape (rows,)."""
    table = _bit_counts(bits.device)
    counts = torch.zeros(len(bits), dtype=torch.int64, device=bits.device)
    for block in row_blocks(len(bits), bits.shape[1]):
        part = bits[block]
        counts[block] = table.index_select(0, part.reshape(-1).int()).view(part.shape).sum(dim=1)
    return counts


def has_bits_behind(bits: torch.Tensor, columns: int) -> bool:
    whole, rest = divmod(columns, 8)
    if rest and bool((bits[:, whole] >> rest).any()):
        return True
    return bool(bits[:, whole + bool(rest) :].any())


def word_counts(bits: torch.Tensor) -> torch.Tensor:
    """How many bits are set in every word: uint8, shape (rows, words)."""
    table = _bit_counts(bits.device)
    counts = torch.empty(len(bits), bits.shape[1] // 8, dtype=torch.uint8, device=bits.device)
    for block in row_blocks(len(bits), bits.shape[1]):
        part = bits[block]
        counts[block] = table.index_select(0, part.reshape(-1).int()).view(*counts[block].shape, 8).sum(-1)
    return counts


def _bit_counts(device: torch.device) -> torch.Tensor:
    """Of every byte how many of its bits are set, uint8."""
    table = torch.arange(256, device=device)
    return sum((table >> position) & 1 for position in range(8)).to(torch.uint8)
