"""The two operations on matrices in 8 bits: `torch.ops.optimum_neuronal.int8_linear` and `.unpack_int8`.

As those of `ops`. All tensors are those of an [`Int8Rows`] that was checked.
"""

import torch

from ..formats.int8_weight import GROUP
from ..native.library import MAX_ROWS, find_kernel, warn_without_kernel
from . import torch_fallback
from .ops import LIBRARY, MAX_FUSED_ROWS, check_beside, check_parts, columns_of, multiply_by_blocks


LIBRARY.define(
    "int8_linear(Tensor x, Tensor levels, Tensor scales, Tensor? bias, bool int8) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
LIBRARY.define(
    "unpack_int8(Tensor levels, Tensor scales, ScalarType dtype) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
)


def int8_linear(
    x: torch.Tensor, levels: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None = None, int8: bool = False
) -> torch.Tensor:
    """`x @ W.T + bias` for a dense W of shape (out, in) of 8-bit levels. See [`coded_linear`], which does the same.

    Args:
        x (`Tensor`): shape (..., in), bfloat16, float16 or float32.
        levels, scales (`Tensor`): of an [`Int8Rows`], on the device of `x`.
        bias (`Tensor`, *optional*): shape (out,), of the dtype of `x`.
        int8 (`bool`): whether few rows of x are rounded to 8 bits, too; more than `MAX_FUSED_ROWS` never are.

    Returns:
        `Tensor`: shape (..., out), of the dtype of `x`.

    Raises:
        `ValueError`: shapes, dtypes or devices do not fit.
    """
    return torch.ops.optimum_neuronal.int8_linear(x, levels, scales, bias, int8)


def unpack_int8(levels: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The dense weight, each element its scale times its level, rounded: shape (out, in).

    Raises:
        `ValueError`: shapes, dtypes or devices do not fit.
    """
    return torch.ops.optimum_neuronal.unpack_int8(levels, scales, dtype)


def check_int8(levels: torch.Tensor, scales: torch.Tensor, columns: int, dtype: torch.dtype) -> None:
    """Raises `ValueError` if these cannot be a matrix in 8 bits with so many columns; costs no look at their contents."""
    parts = {
        "levels": (levels, torch.int8, (len(levels), columns)),
        "scales": (scales, torch.int16, (len(levels), -(-columns // GROUP))),
    }
    check_parts("rows in 8 bits", parts, columns, dtype)


def check_int8_linear(x, levels, scales, bias) -> None:
    """Raises `ValueError` if `int8_linear` cannot be computed of these."""
    check_int8(levels, scales, columns_of(x), x.dtype)
    check_beside(x, levels, bias)


@torch.library.register_fake("optimum_neuronal::int8_linear", lib=LIBRARY)
def _fake_int8_linear(x, levels, scales, bias, int8):
    check_int8_linear(x, levels, scales, bias)
    return x.new_empty(*x.shape[:-1], levels.shape[0])


@torch.library.register_fake("optimum_neuronal::unpack_int8", lib=LIBRARY)
def _fake_unpack_int8(levels, scales, dtype):
    check_int8(levels, scales, levels.shape[1], dtype)
    return levels.new_empty(levels.shape, dtype=dtype)


def _int8_linear(x, levels, scales, bias, int8):
    check_int8_linear(x, levels, scales, bias)
    flat = x.reshape(x.shape[:-1].numel(), x.shape[-1]).contiguous()
    bias, kernel = None if bias is None else bias.contiguous(), find_kernel()
    if kernel is None:
        warn_without_kernel()
        y = torch_fallback.int8_linear(flat, levels, scales, bias, int8 and len(flat) <= MAX_FUSED_ROWS)
    elif len(flat) <= MAX_FUSED_ROWS:
        y = torch.cat([kernel.int8_linear(part, levels, scales, bias, int8) for part in flat.split(MAX_ROWS)])
    else:
        y = multiply_by_blocks(
            flat, len(levels), bias, lambda block, scratch: kernel.unpack_int8(levels[block], scales[block], scratch)
        )
    return y.view(*x.shape[:-1], len(levels))


def _unpack_int8(levels, scales, dtype):
    check_int8(levels, scales, levels.shape[1], dtype)
    kernel = find_kernel()
    if kernel is None:
        return torch_fallback.unpack_int8(levels, scales, dtype)
    dense = levels.new_empty(levels.shape, dtype=dtype)
    kernel.unpack_int8(levels, scales, dense)
    return dense


def _int8_linear_elsewhere(x, levels, scales, bias, int8):
    check_int8_linear(x, levels, scales, bias)
    flat = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    y = torch_fallback.int8_linear(flat, levels, scales, bias, int8 and len(flat) <= MAX_FUSED_ROWS)
    return y.view(*x.shape[:-1], len(levels))


def _unpack_int8_elsewhere(levels, scales, dtype):
    check_int8(levels, scales, levels.shape[1], dtype)
    return torch_fallback.unpack_int8(levels, scales, dtype)


LIBRARY.impl("int8_linear", _int8_linear, "CPU")
LIBRARY.impl("unpack_int8", _unpack_int8, "CPU")
LIBRARY.impl("int8_linear", _int8_linear_elsewhere, "CompositeExplicitAutograd")
LIBRARY.impl("unpack_int8", _unpack_int8_elsewhere, "CompositeExplicitAutograd")
