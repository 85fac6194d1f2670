"""Quantized weights: dense matrices of 2 to 8 bits, with a scale for each row and perhaps a step for each column.

Codes of 2 to 7 bits stand for odd levels, -(2**bits - 1) to 2**bits - 1: with a zero, one side would have a level less.
Codes of 8 bits are their levels, -127 to 127.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from ...native.library import Kernel, find_kernel, warn_without_kernel
from .bit_planes import decode_rows, encode_planes, planes_shape
from .packed_matrix import (
    BLOCK_ROWS,
    DTYPES,
    Header,
    PackedMatrix,
    multiply_by_blocks,
    register_format,
    row_blocks,
)


BITS = range(2, 9)
BYTE_BITS = 8  # codes of 8 bits are whole bytes, codes of fewer bits lie in bit planes
LARGEST_BYTE = 127
MAX_FUSED_ROWS = 16  # of x that the kernels multiply with codes; more are multiplied with unpacked rows


@register_format("quantized")
@dataclass(frozen=True)
class QuantizedWeight(PackedMatrix):
    """A dense low-bit weight. As a change, it replaces another weight.

    An element is `scale of its row * step of its column * level`, in float32, rounded once to `dtype`. The level is
    `2 * code - (2**bits - 1)`, or with 8 bits the code. `codes` of 2 to 7 bits are bit planes, (ceil(rows / 64),
    ceil(columns / 4), bits, 32), uint8; those of 8 bits (rows, columns), int8, -127 to 127.
    """

    names: ClassVar[tuple[str, ...]] = ("codes", "scales", "steps")
    optional: ClassVar[tuple[str, ...]] = ("steps",)
    fixed: ClassVar[Mapping[str, torch.dtype]] = {"scales": torch.bfloat16, "steps": torch.bfloat16}

    codes: torch.Tensor
    scales: torch.Tensor  # bfloat16, shape (rows,), at least 0
    steps: torch.Tensor | None  # bfloat16, shape (columns,), above 0; None: all are 1
    bits: int
    shape: tuple[int, ...]
    dtype: torch.dtype  # of the dense weight

    @classmethod
    def encode(
        cls,
        codes: torch.Tensor,
        bits: int,
        scales: torch.Tensor,
        steps: torch.Tensor | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> "QuantizedWeight":
        """Return the weight of codes of shape (..., columns): uint8 below 2**bits, or with 8 bits int8."""
        rows = codes.reshape(-1, codes.shape[-1]).contiguous()
        held = rows if bits == BYTE_BITS else encode_planes(rows, bits)
        steps = None if steps is None else steps.contiguous()
        return cls(held, scales.contiguous(), steps, bits, tuple(codes.shape), dtype)

    @classmethod
    def nearest(cls, weight: torch.Tensor, bits: int = 8) -> "QuantizedWeight":
        """Round a finite weight (..., columns) to the nearest levels. A row's largest magnitude becomes the largest level."""
        rows = weight.detach().reshape(-1, weight.shape[-1])
        found = [_nearest_rows(rows[part], bits) for part in row_blocks(*rows.shape)]
        codes, scales = (torch.cat(parts) for parts in zip(*found))
        return cls.encode(codes.view(weight.shape), bits, scales, None, weight.dtype)

    @classmethod
    def of_tensors(
        cls, tensors: Mapping[str, torch.Tensor], shape: Sequence[int], dtype: torch.dtype
    ) -> "QuantizedWeight":
        codes = tensors["codes"]
        return cls(codes, tensors["scales"], tensors.get("steps"), bits_of_codes(codes), tuple(shape), dtype)

    @classmethod
    def expected_headers(
        cls, tensors: Mapping[str, torch.Tensor], shape: Sequence[int], dtype: torch.dtype
    ) -> dict[str, Header]:
        bits, rows, columns = bits_of_codes(tensors["codes"]), math.prod(shape[:-1]), shape[-1]
        if bits not in BITS:
            raise ValueError(f"its codes have {bits} bits: expected {BITS[0]} to {BITS[-1]}")
        sides = {"scales": (torch.bfloat16, (rows,)), "steps": (torch.bfloat16, (columns,))}
        return {"codes": codes_header(rows, columns, bits), **sides}

    def check_values(self) -> None:
        codes, scales, steps, bits = self.codes, self.scales, self.steps, self.bits
        if not bool((scales.isfinite() & (scales >= 0)).all()):
            raise ValueError(f"its scales reach from {scales.min()} to {scales.max()}: expected finite, at least 0")
        if steps is not None and not bool((steps.isfinite() & (steps > 0)).all()):
            raise ValueError(f"its steps reach from {steps.min()} to {steps.max()}: expected finite, above 0")
        largest = float(scales.max()) * (1.0 if steps is None else float(steps.max())) * largest_level(bits)
        if largest > torch.finfo(self.dtype).max:
            limit = f"{torch.finfo(self.dtype).max:.3g}, the largest of {self.dtype}"
            raise ValueError(f"its scales and steps allow elements of {largest:.3g}: expected at most {limit}")
        parts = row_blocks(self.row_count, self.shape[-1]) if bits == BYTE_BITS else ()
        if any(bool((codes[part] < -LARGEST_BYTE).any()) for part in parts):
            raise ValueError("its codes have -128 among them: expected -127 to 127")

    def to(self, device: torch.device | None = None, dtype: torch.dtype | None = None) -> "QuantizedWeight":
        codes, scales = self.codes.to(device=device), self.scales.to(device=device)
        steps = None if self.steps is None else self.steps.to(device=device)
        return replace(self, codes=codes, scales=scales, steps=steps, dtype=dtype or self.dtype)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """CPU kernels multiply few rows of x with codes, and round x: that costs 1% with 8-bit codes, else a tenth of it."""
        kernel = self._kernel(x.dtype)
        if kernel is None or len(x) > MAX_FUSED_ROWS:
            if kernel is None and x.device.type == "cpu":
                warn_without_kernel()
            return multiply_by_blocks(x, self.row_count, bias, self.fill)
        return kernel.quantized_linear(x, self.codes, self.bits, self.scales, self.steps, bias)

    def look_up(self, ids: torch.Tensor) -> torch.Tensor:
        """Return some rows, without unpacking others: shape (*ids.shape, columns), of the weight's dtype."""
        flat = ids.reshape(-1)
        return self._elements(flat, self.scales.index_select(0, flat)).to(self.dtype).view(*ids.shape, self.shape[-1])

    def rows(self, first: int, last: int) -> "QuantizedWeight":
        """Return some rows, shared if codes have 8 bits or if `first` and `last` are multiples of 64 or the end."""
        if self.bits == BYTE_BITS:
            codes = self.codes[first:last]
        elif first % BLOCK_ROWS == 0 and (last % BLOCK_ROWS == 0 or last == len(self.scales)):
            codes = self.codes[first // BLOCK_ROWS : -(-last // BLOCK_ROWS)]
        else:
            codes = encode_planes(self._decode(first, last), self.bits)
        return replace(self, codes=codes, scales=self.scales[first:last], shape=(last - first, self.shape[-1]))

    def columns(self, first: int, last: int) -> "QuantizedWeight | None":
        if self.bits == BYTE_BITS:
            codes = self.codes[:, first:last]
        elif first % 4 == 0 and (last % 4 == 0 or last == self.shape[-1]):
            codes = self.codes[:, first // 4 : -(-last // 4)]
        else:
            return None
        steps = None if self.steps is None else self.steps[first:last].contiguous()
        return replace(self, codes=codes.contiguous(), steps=steps, shape=(*self.shape[:-1], last - first))

    @classmethod
    def joined(cls, parts: Sequence["QuantizedWeight"]) -> "QuantizedWeight":
        first, rows = parts[0], [len(part.scales) for part in parts]
        if first.bits == BYTE_BITS or all(count % BLOCK_ROWS == 0 for count in rows[:-1]):
            codes = torch.cat([part.codes for part in parts])
        else:
            codes = encode_planes(torch.cat([part._decode(0, len(part.scales)) for part in parts]), first.bits)
        scales = torch.cat([part.scales for part in parts])
        return replace(first, codes=codes, scales=scales, shape=(sum(rows), first.shape[-1]))

    def joins(self, other: "QuantizedWeight") -> bool:
        mine = (self.bits, self.shape[-1], self.dtype, self.codes.device, self.steps is None)
        theirs = (other.bits, other.shape[-1], other.dtype, other.codes.device, other.steps is None)
        return mine == theirs and (self.steps is None or torch.equal(self.steps, other.steps))

    def error(self, weight: torch.Tensor) -> float:
        """Return the squared error relative to the sum of squares of a dense weight; 0 if that is 0."""
        total = lost = 0.0
        dense = weight.detach().reshape(-1, self.shape[-1])
        for part in row_blocks(*dense.shape):
            values = dense[part].float()
            rounded = self.rows(part.start, part.stop).to(dense.device).unpack().float()
            total += values.square().sum(dtype=torch.float64).item()
            lost += (rounded - values).square().sum(dtype=torch.float64).item()
        return lost / total if total else 0.0

    def _decode(self, first: int, last: int) -> torch.Tensor:
        """Return the codes of some rows of bit planes: uint8, shape (last - first, columns)."""
        return decode_rows(self.codes, torch.arange(first, last, device=self.device), self.shape[-1])

    def _kernel(self, dtype: torch.dtype) -> Kernel | None:
        return find_kernel() if self.codes.device.type == "cpu" and dtype in DTYPES else None

    def fill(self, rows: slice, dense: torch.Tensor) -> None:
        kernel = self._kernel(dense.dtype)
        if kernel is not None:
            part = self.codes[rows] if self.bits == BYTE_BITS else self.codes[rows.start // BLOCK_ROWS :]
            kernel.unpack_quantized(part, self.bits, self.scales[rows], self.steps, dense)
            return
        for chunk in row_blocks(*dense.shape):
            some = torch.arange(rows.start + chunk.start, rows.start + chunk.stop, device=self.codes.device)
            dense[chunk] = self._elements(some, self.scales[some]).to(dense.dtype)

    def _elements(self, rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        if self.bits == BYTE_BITS:
            levels = self.codes.index_select(0, rows).float()
        else:
            levels = 2 * decode_rows(self.codes, rows, self.shape[-1]).float() - largest_level(self.bits)
        factors = scales.float()[:, None] if self.steps is None else scales.float()[:, None] * self.steps.float()
        return (levels * factors).add_(0.0)  # no -0.0 where a scale is 0


def quantized_bytes(shape: Sequence[int], bits: int, steps: bool = False) -> int:
    """Return the bytes that a quantized weight takes: codes, scales, and steps if it has some."""
    rows, columns = math.prod(shape[:-1]), shape[-1]
    return math.prod(codes_header(rows, columns, bits)[1]) + 2 * rows + (2 * columns if steps else 0)


def _nearest_rows(rows: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and scales of some rows; the scale of a row of zeros is 0."""
    wide, largest = rows.float(), largest_level(bits)
    most = wide.abs().amax(1)
    scales = (most / largest).clamp(min=torch.finfo(torch.bfloat16).tiny).bfloat16()
    too_large = scales.double() * largest > torch.finfo(rows.dtype).max  # rounded up; the next number below is not
    scales = (scales.view(torch.int16) - too_large.to(torch.int16)).view(torch.bfloat16)
    levels = wide / scales.float()[:, None]
    scales = scales.masked_fill(most == 0, 0)
    if bits == BYTE_BITS:
        return levels.round_().clamp_(-largest, largest).to(torch.int8), scales
    return levels.add_(largest).div_(2).round_().clamp_(0, largest).to(torch.uint8), scales


def largest_level(bits: int) -> int:
    """Return the largest number by which a scale is multiplied."""
    return LARGEST_BYTE if bits == BYTE_BITS else 2**bits - 1


def bits_of_codes(codes: torch.Tensor) -> int:
    """Return the bits of codes by their dtype and shape: 8 of bytes, else the third dimension of planes."""
    return codes.shape[2] if codes.dtype == torch.uint8 and codes.ndim == 4 else BYTE_BITS


def codes_header(rows: int, columns: int, bits: int) -> Header:
    """Return dtype and shape of the codes of a matrix."""
    if bits == BYTE_BITS:
        return torch.int8, (rows, columns)
    return torch.uint8, planes_shape(rows, columns, bits)
