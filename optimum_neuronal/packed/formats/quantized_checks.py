"""Checks of a quantized weight from a file: first what headers say of its tensors, then their contents."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .bit_planes import chunk_rows, has_bits_behind, planes_shape
from .packed_matrix import DTYPES, Header, check_shape, check_tensors


BITS = range(2, 9)
BYTE_BITS = 8  # codes of 8 bits are whole bytes, codes of fewer bits lie in bit planes
LARGEST_BYTE = 127


def largest_level(bits: int) -> int:
    """Return the largest number by which a scale is multiplied."""
    return LARGEST_BYTE if bits == BYTE_BITS else 2**bits - 1


def bits_of_codes(header: tuple[torch.dtype, tuple[int, ...]]) -> int:
    """Return the bits of codes by dtype and shape of their tensor: 8 of bytes, else the third dimension of planes."""
    dtype, shape = header
    return shape[2] if dtype == torch.uint8 and len(shape) == 4 else BYTE_BITS


def codes_header(rows: int, columns: int, bits: int) -> Header:
    """Return dtype and shape of the codes of a matrix."""
    if bits == BYTE_BITS:
        return torch.int8, (rows, columns)
    return torch.uint8, planes_shape(rows, columns, bits)


def check_bits(bits: Any) -> None:
    """Raise `ValueError` unless codes can have so many bits."""
    if type(bits) is not int or bits not in BITS:
        raise ValueError(f"its codes have {bits!r} bits: expected a whole number from {BITS[0]} to {BITS[-1]}")


def check_headers(shape: Any, bits: Any, dtype: Any, headers: Mapping[str, Header]) -> None:
    """Raise `ValueError` unless the headers of a quantized weight agree with each other."""
    check_shape(shape, dtype)
    if dtype not in DTYPES:
        raise ValueError(f"its dtype is {dtype}: expected one of {', '.join(map(str, DTYPES))}")
    check_bits(bits)
    rows, columns = math.prod(shape[:-1]), shape[-1]
    expected = {"codes": codes_header(rows, columns, bits), "scales": (torch.bfloat16, (rows,))}
    if "steps" in headers:
        expected["steps"] = (torch.bfloat16, (columns,))
    check_tensors(headers, expected, shape, f"{bits} bits and a weight")


def check_contents(
    codes: torch.Tensor,
    scales: torch.Tensor,
    steps: torch.Tensor | None,
    bits: int,
    shape: Sequence[int],
    dtype: torch.dtype,
) -> None:
    """Raise `ValueError` unless all numbers are in range and nothing is set behind the last row and column."""
    if not bool((scales.isfinite() & (scales >= 0)).all()):
        raise ValueError(f"its scales reach from {scales.min()} to {scales.max()}: expected finite, at least 0")
    if steps is not None and not bool((steps.isfinite() & (steps > 0)).all()):
        raise ValueError(f"its steps reach from {steps.min()} to {steps.max()}: expected finite, above 0")
    largest = float(scales.max()) * (1.0 if steps is None else float(steps.max())) * largest_level(bits)
    if largest > torch.finfo(dtype).max:
        limit = f"{torch.finfo(dtype).max:.3g}, the largest of {dtype}"
        raise ValueError(f"its scales and steps allow elements of {largest:.3g}: expected at most {limit}")
    rows, columns = math.prod(shape[:-1]), shape[-1]
    if bits < BYTE_BITS and has_bits_behind(codes, rows, columns):
        raise ValueError(f"its codes have bits set behind the {rows} rows and {columns} columns of the weight")
    if bits == BYTE_BITS and any(bool((codes[part] < -LARGEST_BYTE).any()) for part in chunk_rows(rows, columns)):
        raise ValueError("its codes have -128 among them: expected -127 to 127")


def check_dense(weight: torch.Tensor) -> None:
    """Raise `ValueError` unless a dense weight can be quantized."""
    if weight.ndim < 2 or not weight.numel() or weight.dtype not in DTYPES:
        expected = f"a matrix, or a stack of them, of one of {', '.join(map(str, DTYPES))}"
        raise ValueError(
            f"a weight of shape {list(weight.shape)} and {weight.dtype} cannot be quantized: expected {expected}"
        )
    rows = weight.reshape(-1, weight.shape[-1])
    if not all(bool(rows[part].isfinite().all()) for part in chunk_rows(*rows.shape)):
        raise ValueError("a weight with NaN or infinite values cannot be quantized: mend it first")
