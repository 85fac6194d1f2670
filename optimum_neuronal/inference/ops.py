"""The two operations on packed rows, as torch knows them: `torch.ops.optimum_neuronal.packed_linear` and `.unpack_rows`.

Each has an implementation by device, and one for `torch.compile` that tells only shapes, so that a graph stays whole.
Bits, values and offsets are those of a [`PackedRows`] that was checked: kernels believe what they say.
"""

from collections.abc import Callable, Mapping

import torch

from ..formats.bitmask import row_stride
from ..native.library import DTYPES, MAX_ROWS, Kernel, find_kernel, warn_without_kernel
from . import accelerator, torch_fallback
from .bit_rows import row_blocks


# Rows of x up to which a fused kernel is faster than unpacking and torch.mm, by benchmarks/packed_kernels.py.
MAX_FUSED_ROWS = 8
MAX_FUSED_ROWS_BY_KERNEL = {"avx512_bf16": 16}
# Rows of a weight that are unpacked at a time: so many that torch.mm is as fast as on all of them.
SCRATCH_ROWS = 1024

LIBRARY = torch.library.Library("optimum_neuronal", "DEF")
LIBRARY.define(
    "packed_linear(Tensor x, Tensor bits, Tensor values, Tensor offsets, Tensor? bias) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
LIBRARY.define(
    "unpack_rows(Tensor bits, Tensor values, Tensor offsets, int columns) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def packed_linear(
    x: torch.Tensor, bits: torch.Tensor, values: torch.Tensor, offsets: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`x @ W.T + bias` for a packed W of shape (out, in); sums are taken in float32, in a fixed order.

    Args:
        x (`Tensor`): shape (..., in), of the values' dtype.
        bits, values, offsets (`Tensor`): of a [`PackedRows`], on the device of `x`.
        bias (`Tensor`, *optional*): shape (out,), of the values' dtype.

    Returns:
        `Tensor`: shape (..., out), of the dtype of `x`.

    Raises:
        `ValueError`: shapes, dtypes or devices do not fit.
    """
    return torch.ops.optimum_neuronal.packed_linear(x, bits, values, offsets, bias)


def unpack_rows(bits: torch.Tensor, values: torch.Tensor, offsets: torch.Tensor, columns: int) -> torch.Tensor:
    """The dense weight, bit-equal: shape (out, columns), of the values' dtype, on their device.

    Args:
        bits, values, offsets (`Tensor`): of a [`PackedRows`].
        columns (`int`): the weight's `in`.

    Raises:
        `ValueError`: shapes, dtypes or devices do not fit.
    """
    return torch.ops.optimum_neuronal.unpack_rows(bits, values, offsets, columns)


def check_packed(bits: torch.Tensor, values: torch.Tensor, offsets: torch.Tensor, columns: int) -> None:
    """Raises `ValueError` if these cannot be a packed weight with so many columns; costs no look at their contents."""
    if bits.ndim != 2 or bits.shape[1] != row_stride(columns) or offsets.shape != (len(bits) + 1,):
        raise ValueError(
            f"packed rows have bits of shape {list(bits.shape)} and offsets of shape {list(offsets.shape)}: expected "
            f"[out, {row_stride(columns)}] and [out + 1] for {columns} columns"
        )
    if not (bits.is_contiguous() and values.is_contiguous() and offsets.is_contiguous() and values.ndim == 1):
        raise ValueError("packed rows are not contiguous")
    if bits.dtype != torch.uint8 or offsets.dtype != torch.int64:
        raise ValueError(
            f"packed rows have bits of {bits.dtype} and offsets of {offsets.dtype}: expected torch.uint8, torch.int64"
        )
    if not bits.device == values.device == offsets.device:
        raise ValueError(
            f"packed rows lie on {bits.device}, {values.device} and {offsets.device}: expected one device"
        )


def columns_of(x: torch.Tensor) -> int:
    """How many inputs a row of x is of. Raises `ValueError` if it has no dimension."""
    if x.ndim == 0:
        raise ValueError("x has no dimension: expected shape (..., in)")
    return x.shape[-1]


def check_parts(
    what: str, parts: Mapping[str, tuple[torch.Tensor, torch.dtype, tuple[int, ...]]], columns: int, dtype: torch.dtype
) -> None:
    """Raises `ValueError` unless the tensors of a weight of few bits are as expected, and it can be computed in a dtype.

    Args:
        what (`str`): how the weight is called in messages.
        parts (`Mapping`): name -> tensor, and the dtype and shape that it should have; all on the device of the first.
        columns (`int`): of the weight.
        dtype (`torch.dtype`): of x.
    """
    device = next(iter(parts.values()))[0].device
    for name, (tensor, kind, shape) in parts.items():
        if tensor.dtype != kind or tensor.shape != shape or tensor.device != device or not tensor.is_contiguous():
            raise ValueError(
                f"{what} have {name} of {tensor.dtype} and shape {list(tensor.shape)} on {tensor.device}: expected "
                f"{kind} and {list(shape)}, contiguous, on {device}, for {columns} columns"
            )
    if dtype not in DTYPES:
        raise ValueError(f"{what} cannot be computed in {dtype}: expected one of {', '.join(map(str, DTYPES))}")


def check_beside(x: torch.Tensor, part: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Raises `ValueError` unless x and bias go with a weight of few bits, of whose tensors `part` has as many rows."""
    if x.device != part.device:
        raise ValueError(f"x is on {x.device}, but the weight on {part.device}")
    if bias is not None and (bias.dtype != x.dtype or bias.device != x.device or bias.shape != (len(part),)):
        raise ValueError(
            f"the bias is {bias.dtype} of shape {list(bias.shape)} on {bias.device}: expected {x.dtype}, [{len(part)}] "
            f"on {x.device}"
        )


def check_linear(
    x: torch.Tensor, bits: torch.Tensor, values: torch.Tensor, offsets: torch.Tensor, bias: torch.Tensor | None
) -> None:
    """Raises `ValueError` if `packed_linear` cannot be computed of these."""
    check_packed(bits, values, offsets, columns_of(x))
    for name, tensor in (("x", x), ("the bias", bias)):
        if tensor is not None and (tensor.dtype != values.dtype or tensor.device != values.device):
            raise ValueError(
                f"{name} is {tensor.dtype} on {tensor.device}, but the weight {values.dtype} on {values.device}"
            )
    if bias is not None and bias.shape != (len(bits),):
        raise ValueError(f"the bias has shape {list(bias.shape)}: expected [{len(bits)}]")


@torch.library.register_fake("optimum_neuronal::packed_linear", lib=LIBRARY)
def _fake_packed_linear(x, bits, values, offsets, bias):
    check_linear(x, bits, values, offsets, bias)
    return x.new_empty(*x.shape[:-1], bits.shape[0])


@torch.library.register_fake("optimum_neuronal::unpack_rows", lib=LIBRARY)
def _fake_unpack_rows(bits, values, offsets, columns):
    check_packed(bits, values, offsets, columns)
    return values.new_empty(bits.shape[0], columns)


def _packed_linear(x, bits, values, offsets, bias):
    check_linear(x, bits, values, offsets, bias)
    kernel = find_kernel()
    if kernel is None:
        warn_without_kernel()
        return torch_fallback.packed_linear(x, bits, values, offsets, bias)
    flat = x.reshape(x.shape[:-1].numel(), x.shape[-1]).contiguous()  # -1 would be any number where in is 0
    max_fused = MAX_FUSED_ROWS_BY_KERNEL.get(kernel.name, MAX_FUSED_ROWS)
    multiply = _multiply_packed if len(flat) <= max_fused else _multiply_unpacked
    bias = None if bias is None else bias.contiguous()
    return multiply(kernel, flat, bits, values, offsets, bias).view(*x.shape[:-1], bits.shape[0])


def _multiply_packed(kernel: Kernel, x, bits, values, offsets, bias):
    if len(x) <= MAX_ROWS:
        return kernel.linear(x, bits, values, offsets, bias)
    return torch.cat([kernel.linear(part, bits, values, offsets, bias) for part in x.split(MAX_ROWS)])


def _multiply_unpacked(kernel: Kernel, x, bits, values, offsets, bias):
    def fill(block: slice, scratch: torch.Tensor) -> None:
        kernel.unpack(bits[block], values, offsets[block.start : block.stop + 1], scratch)

    return multiply_by_blocks(x, len(bits), bias, fill)


def multiply_by_blocks(
    x: torch.Tensor, rows: int, bias: torch.Tensor | None, fill: Callable[[slice, torch.Tensor], None]
) -> torch.Tensor:
    """`x @ W.T + bias`, W unpacked some rows at a time into scratch memory.

    Args:
        x (`Tensor`): shape (count, columns), contiguous.
        rows (`int`): of W.
        bias (`Tensor`, *optional*): shape (rows,).
        fill (`Callable`): unpacks a slice of rows into a tensor of shape (those, columns), of the dtype of x.
    """
    columns = x.shape[1]
    y = x.new_empty(len(x), rows)
    scratch = None
    for block in row_blocks(rows, columns, SCRATCH_ROWS * columns):
        count = block.stop - block.start
        scratch = x.new_empty(count, columns) if scratch is None else scratch[:count]
        fill(block, scratch)
        if bias is None:
            torch.mm(x, scratch.t(), out=y[:, block])
        else:
            torch.addmm(bias[block], x, scratch.t(), out=y[:, block])
    return y


def _unpack_rows(bits, values, offsets, columns):
    check_packed(bits, values, offsets, columns)
    kernel = find_kernel()
    if kernel is None:
        return torch_fallback.unpack_rows(bits, values, offsets, columns)
    dense = values.new_empty(len(bits), columns)
    kernel.unpack(bits, values, offsets, dense)
    return dense


def _packed_linear_elsewhere(x, bits, values, offsets, bias):
    check_linear(x, bits, values, offsets, bias)
    return accelerator.packed_linear(x, bits, values, offsets, bias)


def _unpack_rows_elsewhere(bits, values, offsets, columns):
    check_packed(bits, values, offsets, columns)
    return accelerator.unpack_rows(bits, values, offsets, columns)


LIBRARY.impl("packed_linear", _packed_linear, "CPU")
LIBRARY.impl("unpack_rows", _unpack_rows, "CPU")
# This key stands for every device that has no implementation of its own.
LIBRARY.impl("packed_linear", _packed_linear_elsewhere, "CompositeExplicitAutograd")
LIBRARY.impl("unpack_rows", _unpack_rows_elsewhere, "CompositeExplicitAutograd")
