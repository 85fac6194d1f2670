"""The operations on packed matrices, as torch knows them: `torch.ops.optimum_neuronal.packed_linear` and others.

Graphs of `torch.compile` call these, and stay whole. All else calls [`linear`], which spares torch's dispatch: half of a
call; or [`product`], where something may be differentiated. A matrix comes as the name of its format and its tensors, in
the format's order.
"""

import math
from collections.abc import Sequence
from functools import partial

import torch

from . import accelerator
from .formats.packed_matrix import DTYPES, FORMATS, SCRATCH_ROWS, PackedMatrix, check_places, headers_of, row_blocks
from .inference_only import is_differentiated


LIBRARY = torch.library.Library("optimum_neuronal", "DEF")
LIBRARY.define(
    "packed_linear(Tensor x, str format, Tensor[] tensors, int rows, Tensor? bias) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
LIBRARY.define(
    "packed_gradient(Tensor gradient, str format, Tensor[] tensors, int columns) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
LIBRARY.define(
    "unpack(str format, Tensor[] tensors, int rows, int columns, ScalarType dtype) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def linear(matrix: PackedMatrix, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return `x @ W.T + bias` for a matrix that was checked; sums are taken in a fixed order.

    Args:
        matrix ([`PackedMatrix`]): W, shape (out, in).
        x (`Tensor`): shape (..., in), of the matrix's dtype, on its device.
        bias (`Tensor`, *optional*): shape (out,), of the same dtype.

    Returns:
        `Tensor`: shape (..., out), of the dtype of `x`.

    Raises:
        `ValueError`: shapes, dtypes or devices do not fit.
    """
    # Torch knows the operation of traces, and what subclasses of tensors make of it.
    if type(x) is not torch.Tensor or torch.jit.is_tracing():
        tensors = list(matrix.tensors().values())
        return torch.ops.optimum_neuronal.packed_linear(x, matrix.name, tensors, matrix.row_count, bias)
    return _linear(matrix, x, bias)


def product(matrix: PackedMatrix, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return what [`linear`] does, followed by autograd, forward-mode AD and torch.func; W and the bias are constants."""
    return Product.apply(x, matrix, bias, False) if is_differentiated(x) else linear(matrix, x, bias)


class Product(torch.autograd.Function):
    """`x @ W.T + bias`, or if `turned` `x @ W`: linear in x, so that each is the other's gradient."""

    @staticmethod
    def forward(x, matrix, bias, turned):
        if type(x) is torch.Tensor:
            return input_gradient(matrix, x) if turned else _linear(matrix, x, bias)
        tensors = list(matrix.tensors().values())  # of a graph that is traced
        with torch._C._AutoDispatchBelowAutograd():
            if turned:
                return torch.ops.optimum_neuronal.packed_gradient(x, matrix.name, tensors, matrix.shape[-1])
            return torch.ops.optimum_neuronal.packed_linear(x, matrix.name, tensors, matrix.row_count, bias)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, ctx.matrix, _, ctx.turned = inputs

    @staticmethod
    def backward(ctx, gradient):
        return Product.apply(gradient, ctx.matrix, None, not ctx.turned), None, None, None

    @staticmethod
    def jvp(ctx, tangent, *_):
        return Product.apply(tangent, ctx.matrix, None, ctx.turned)

    @staticmethod
    def vmap(info, dims, x, matrix, bias, turned):
        return Product.apply(x.movedim(dims[0], 0), matrix, bias, turned), 0


def input_gradient(matrix: PackedMatrix, gradient: torch.Tensor) -> torch.Tensor:
    """Return `gradient @ W`, W unpacked some rows at a time; sums over these are taken in float32.

    Args:
        matrix ([`PackedMatrix`]): W, shape (out, in), checked.
        gradient (`Tensor`): of the product's output, shape (..., out), of the matrix's dtype, on its device.

    Returns:
        `Tensor`: shape (..., in), of the dtype of `gradient`.
    """
    rows, columns = matrix.row_count, matrix.shape[-1]
    flat = gradient.reshape(math.prod(gradient.shape[:-1]), rows)
    total = flat.new_zeros(len(flat), columns, dtype=torch.float32)
    # On CPUs torch takes fifty times as long for bfloat16, unless the second matrix is transposed.
    wide = torch.float32 if flat.device.type == "cpu" else flat.dtype
    for block in row_blocks(rows, columns, SCRATCH_ROWS * columns):
        total += flat[:, block].to(wide) @ unpack(matrix.window(block.start, block.stop)).to(wide)
    return total.to(gradient.dtype).view(*gradient.shape[:-1], columns)


def unpack(matrix: PackedMatrix) -> torch.Tensor:
    """Return the dense weight of a matrix that was checked, of its shape and dtype, on its device."""
    if matrix.device.type != "cpu":
        return accelerator.unpack(matrix)
    return matrix.unpack()


def _linear(matrix: PackedMatrix, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    # A token's products take as long as this function, so it asks nothing twice.
    shape, columns, rows = x.shape, matrix.shape[-1], matrix.row_count
    if not shape or shape[-1] != columns:
        raise ValueError(f"x has shape {list(shape)}: expected (..., {columns})")
    if x.dtype != matrix.dtype or x.device != matrix.device:
        raise ValueError(f"x is {x.dtype} on {x.device}, but the weight {matrix.dtype} on {matrix.device}")
    if bias is not None:
        _check_bias(bias, x, rows)
        bias = bias.contiguous()
    flat = x if len(shape) == 2 else x.reshape(math.prod(shape[:-1]), columns)
    multiply = matrix.linear if x.device.type == "cpu" else partial(accelerator.linear, matrix)
    y = multiply(flat.contiguous(), bias)
    return y if len(shape) == 2 else y.view(*shape[:-1], rows)


def _check_bias(bias: torch.Tensor, x: torch.Tensor, rows: int) -> None:
    """Raise `ValueError` unless a bias goes with a product."""
    if bias.dtype != x.dtype or bias.device != x.device or bias.shape != (rows,):
        raise ValueError(
            f"the bias is {bias.dtype} of shape {list(bias.shape)} on {bias.device}: expected {x.dtype}, [{rows}] on {x.device}"
        )


def matrix_of(
    format: str, tensors: Sequence[torch.Tensor], rows: int, columns: int, dtype: torch.dtype
) -> PackedMatrix:
    """Return the matrix of tensors that may come from anywhere; costs no look at their contents.

    Raises:
        `ValueError`: they cannot be those of a matrix of this shape and dtype.
    """
    kind = FORMATS.get(format)
    if dtype not in DTYPES:
        raise ValueError(
            f"packed weights cannot be computed in {dtype}: expected one of {', '.join(map(str, DTYPES))}"
        )
    least = len(kind.names) - len(kind.optional)
    if not least <= len(tensors) <= len(kind.names):
        raise ValueError(f"{len(tensors)} tensors of a {format} weight are given: expected {', '.join(kind.names)}")
    named = dict(zip(kind.names, tensors))
    kind.check_headers((rows, columns), dtype, headers_of(named))
    check_places(named)
    return kind.of_tensors(named, (rows, columns), dtype)


@torch.library.register_fake("optimum_neuronal::packed_linear", lib=LIBRARY)
def _fake_packed_linear(x, format, tensors, rows, bias):
    return x.new_empty(*x.shape[:-1], rows)


@torch.library.register_fake("optimum_neuronal::unpack", lib=LIBRARY)
def _fake_unpack(format, tensors, rows, columns, dtype):
    return tensors[0].new_empty(rows, columns, dtype=dtype)


@torch.library.register_fake("optimum_neuronal::packed_gradient", lib=LIBRARY)
def _fake_packed_gradient(gradient, format, tensors, columns):
    return gradient.new_empty(*gradient.shape[:-1], columns)


def _packed_linear(x, format, tensors, rows, bias):
    return _linear(_matrix_for(x, format, tensors, rows), x, bias)


def _differentiable_linear(x, format, tensors, rows, bias):
    if is_differentiated(x):
        return Product.apply(x, _matrix_for(x, format, tensors, rows), bias, False)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.optimum_neuronal.packed_linear(x, format, tensors, rows, bias)


def _matrix_for(x: torch.Tensor, format: str, tensors: Sequence[torch.Tensor], rows: int) -> PackedMatrix:
    if x.ndim == 0:
        raise ValueError("x has no dimension: expected shape (..., in)")
    return matrix_of(format, tensors, rows, x.shape[-1], x.dtype)


def _packed_gradient(gradient, format, tensors, columns):
    return input_gradient(matrix_of(format, tensors, gradient.shape[-1], columns, gradient.dtype), gradient)


def _unpack(format, tensors, rows, columns, dtype):
    return unpack(matrix_of(format, tensors, rows, columns, dtype))


# This key stands for every device.
LIBRARY.impl("packed_linear", _packed_linear, "CompositeExplicitAutograd")
LIBRARY.impl("packed_linear", _differentiable_linear, "Autograd")
LIBRARY.impl("packed_gradient", _packed_gradient, "CompositeExplicitAutograd")
LIBRARY.impl("unpack", _unpack, "CompositeExplicitAutograd")
