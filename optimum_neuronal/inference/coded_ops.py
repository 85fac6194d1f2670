"""The two operations on rows with codes of few bits: `torch.ops.optimum_neuronal.coded_linear` and `.unpack_coded`.

As those of `ops`. All tensors are those of a [`CodedRows`] that was checked: kernels believe what they say.
"""

import torch

from ..formats.bitmask import row_stride
from ..formats.coded import GROUP
from ..native.library import BITS_BY_LEVELS, MAX_ROWS, Kernel, find_kernel, warn_without_kernel
from . import accelerator, torch_fallback
from .ops import LIBRARY, MAX_FUSED_ROWS, check_beside, check_parts, columns_of, multiply_by_blocks


LIBRARY.define(
    "coded_linear(Tensor x, Tensor bits, Tensor codes, Tensor offsets, Tensor scales, Tensor table, Tensor? bias, "
    "bool int8) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
LIBRARY.define(
    "unpack_coded(Tensor bits, Tensor codes, Tensor offsets, Tensor scales, Tensor table, int columns, "
    "ScalarType dtype) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def coded_linear(
    x: torch.Tensor,
    bits: torch.Tensor,
    codes: torch.Tensor,
    offsets: torch.Tensor,
    scales: torch.Tensor,
    table: torch.Tensor,
    bias: torch.Tensor | None = None,
    int8: bool = False,
) -> torch.Tensor:
    """`x @ W.T + bias` for a W of shape (out, in) whose values are codes.

    Up to `MAX_FUSED_ROWS` rows of x are multiplied with levels, group by group; more with rows that are unpacked to the
    dtype of x, and never rounded.

    Args:
        x (`Tensor`): shape (..., in), bfloat16, float16 or float32.
        bits, codes, offsets, scales, table (`Tensor`): of a [`CodedRows`], on the device of `x`.
        bias (`Tensor`, *optional*): shape (out,), of the dtype of `x`.
        int8 (`bool`): whether few rows of x are rounded to 8 bits, by groups of 128 columns with one scale, see
            [`to_int8`]; products are then summed exactly. Else they are summed in float32, in a fixed order.

    Returns:
        `Tensor`: shape (..., out), of the dtype of `x`.

    Raises:
        `ValueError`: shapes, dtypes or devices do not fit.
    """
    return torch.ops.optimum_neuronal.coded_linear(x, bits, codes, offsets, scales, table, bias, int8)


def unpack_coded(
    bits: torch.Tensor,
    codes: torch.Tensor,
    offsets: torch.Tensor,
    scales: torch.Tensor,
    table: torch.Tensor,
    columns: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The dense weight, each element its scale times its level, rounded: shape (out, columns).

    Args:
        bits, codes, offsets, scales, table (`Tensor`): of a [`CodedRows`].
        columns (`int`): the weight's `in`.
        dtype (`torch.dtype`): of the result: bfloat16, float16 or float32.

    Raises:
        `ValueError`: shapes, dtypes or devices do not fit.
    """
    return torch.ops.optimum_neuronal.unpack_coded(bits, codes, offsets, scales, table, columns, dtype)


def check_coded(
    bits: torch.Tensor,
    codes: torch.Tensor,
    offsets: torch.Tensor,
    scales: torch.Tensor,
    table: torch.Tensor,
    columns: int,
    dtype: torch.dtype,
) -> None:
    """Raises `ValueError` if these cannot be a coded weight with so many columns; costs no look at their contents."""
    parts = {
        "bits": (bits, torch.uint8, (len(bits), row_stride(columns))),
        "codes": (codes, torch.uint8, (codes.numel(),)),
        "offsets": (offsets, torch.int64, (len(bits) + 1,)),
        "scales": (scales, scale_dtype(scales), (len(bits), -(-columns // GROUP))),
        "table": (table, torch.int8, (table.numel(),)),
    }
    check_parts("coded rows", parts, columns, dtype)
    if len(table) not in BITS_BY_LEVELS:
        raise ValueError(f"coded rows have a table of {len(table)} levels: expected 4, 8, 16 or 0")


def scale_dtype(scales: torch.Tensor) -> torch.dtype:
    """The dtype that scales should have: uint8 of codes, else int16."""
    return torch.uint8 if scales.dtype == torch.uint8 else torch.int16


def check_coded_linear(x, bits, codes, offsets, scales, table, bias) -> None:
    """Raises `ValueError` if `coded_linear` cannot be computed of these."""
    check_coded(bits, codes, offsets, scales, table, columns_of(x), x.dtype)
    check_beside(x, bits, bias)


@torch.library.register_fake("optimum_neuronal::coded_linear", lib=LIBRARY)
def _fake_coded_linear(x, bits, codes, offsets, scales, table, bias, int8):
    check_coded_linear(x, bits, codes, offsets, scales, table, bias)
    return x.new_empty(*x.shape[:-1], bits.shape[0])


@torch.library.register_fake("optimum_neuronal::unpack_coded", lib=LIBRARY)
def _fake_unpack_coded(bits, codes, offsets, scales, table, columns, dtype):
    check_coded(bits, codes, offsets, scales, table, columns, dtype)
    return bits.new_empty(bits.shape[0], columns, dtype=dtype)


def _coded_linear(x, bits, codes, offsets, scales, table, bias, int8):
    check_coded_linear(x, bits, codes, offsets, scales, table, bias)
    flat = x.reshape(x.shape[:-1].numel(), x.shape[-1]).contiguous()  # -1 would be any number where in is 0
    bias = None if bias is None else bias.contiguous()
    coded, kernel = (bits, codes, offsets, scales, table), find_kernel()
    if kernel is None:
        warn_without_kernel()
        y = torch_fallback.coded_linear(flat, *coded, bias, int8 and len(flat) <= MAX_FUSED_ROWS)
    elif len(flat) <= MAX_FUSED_ROWS:
        y = torch.cat([kernel.coded_linear(part, *coded, bias, int8) for part in flat.split(MAX_ROWS)])
    else:
        y = multiply_by_blocks(flat, len(bits), bias, lambda block, scratch: _fill(kernel, coded, block, scratch))
    return y.view(*x.shape[:-1], len(bits))


def _fill(kernel: Kernel, coded: tuple[torch.Tensor, ...], block: slice, scratch: torch.Tensor) -> None:
    bits, codes, offsets, scales, table = coded
    kernel.unpack_coded(bits[block], codes, offsets[block.start : block.stop + 1], scales[block], table, scratch)


def _unpack_coded(bits, codes, offsets, scales, table, columns, dtype):
    check_coded(bits, codes, offsets, scales, table, columns, dtype)
    kernel = find_kernel()
    if kernel is None:
        return torch_fallback.unpack_coded(bits, codes, offsets, scales, table, columns, dtype)
    dense = bits.new_empty(len(bits), columns, dtype=dtype)
    kernel.unpack_coded(bits, codes, offsets, scales, table, dense)
    return dense


def _coded_linear_elsewhere(x, bits, codes, offsets, scales, table, bias, int8):
    check_coded_linear(x, bits, codes, offsets, scales, table, bias)
    return accelerator.coded_kernels(x.device).coded_linear(x, bits, codes, offsets, scales, table, bias, int8)


def _unpack_coded_elsewhere(bits, codes, offsets, scales, table, columns, dtype):
    check_coded(bits, codes, offsets, scales, table, columns, dtype)
    return accelerator.coded_kernels(bits.device).unpack_coded(bits, codes, offsets, scales, table, columns, dtype)


LIBRARY.impl("coded_linear", _coded_linear, "CPU")
LIBRARY.impl("unpack_coded", _unpack_coded, "CPU")
LIBRARY.impl("coded_linear", _coded_linear_elsewhere, "CompositeExplicitAutograd")
LIBRARY.impl("unpack_coded", _unpack_coded_elsewhere, "CompositeExplicitAutograd")
