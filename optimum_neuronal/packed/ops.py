"""Operations on packed matrices, for torch.compile and autograd: `torch.ops.optimum_neuronal.packed_linear` and others.

An operation takes a matrix as the name of its format and its tensors, in the format's order.
"""

import math
from collections.abc import Sequence
from functools import partial

import torch

from . import accelerator
from .formats.packed_matrix import FORMATS, SCRATCH_ROWS, PackedMatrix, row_blocks


ADVICE = "call optimum_neuronal.densify(model) first"
REFUSAL = (
    f"The model's weights are packed and cannot be trained: to train them, {ADVICE}. To train LoRA beside packed weights, "
    "call peft.get_peft_model(model, optimum_neuronal.lora_for_packed(model, config))."
)

LIBRARY = torch.library.Library("optimum_neuronal", "DEF")
for _schema in (
    "packed_linear(Tensor x, str format, Tensor[] tensors, int rows, Tensor? bias) -> Tensor",
    "packed_gradient(Tensor gradient, str format, Tensor[] tensors, int columns) -> Tensor",
    "block_gradient(Tensor x) -> Tensor",
    "refuse_gradient(Tensor gradient) -> Tensor",
):
    LIBRARY.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


def linear(matrix: PackedMatrix, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return `x @ W.T + bias`, x (..., in), bias (out,), for a checked matrix W (out, in). Gradients reach x only."""
    differentiated = x.requires_grad and torch.is_grad_enabled()
    if differentiated or type(x) is not torch.Tensor or torch.jit.is_tracing():
        tensors = list(matrix.tensors().values())
        return torch.ops.optimum_neuronal.packed_linear(x, matrix.name, tensors, matrix.row_count, bias)
    # Without torch's dispatch, which takes as long as the rest of a small product.
    return _rows(matrix, x, bias).view(*x.shape[:-1], matrix.row_count)


def unpack(matrix: PackedMatrix) -> torch.Tensor:
    """Return the dense weight of a checked matrix, of its shape and dtype, on its device."""
    return matrix.unpack() if matrix.device.type == "cpu" else accelerator.unpack(matrix)


def _rows(matrix: PackedMatrix, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return the product as a new matrix (tokens, out), after checking the tensors."""
    shape, columns, rows = x.shape, matrix.shape[-1], matrix.row_count
    if not shape or shape[-1] != columns:
        raise ValueError(f"x has shape {list(shape)}: expected (..., {columns})")
    if x.dtype != matrix.dtype or x.device != matrix.device:
        raise ValueError(f"x is {x.dtype} on {x.device}, but the weight {matrix.dtype} on {matrix.device}")
    if bias is not None:
        if (bias.dtype, bias.device, bias.shape) != (x.dtype, x.device, (rows,)):
            raise ValueError(f"the bias is {bias.dtype} of shape {list(bias.shape)}: expected {x.dtype} and [{rows}]")
        bias = bias.contiguous()
    flat = x if len(shape) == 2 else x.reshape(math.prod(shape[:-1]), columns)
    multiply = matrix.linear if x.device.type == "cpu" else partial(accelerator.linear, matrix)
    return multiply(flat.contiguous(), bias)


def matrix_of(
    format: str, tensors: Sequence[torch.Tensor], rows: int, columns: int, dtype: torch.dtype
) -> PackedMatrix:
    """Return the matrix of an operation's tensors. Shapes and dtypes are checked, but not the contents."""
    kind = FORMATS.get(format)
    named = dict(zip(kind.names, tensors))
    kind.check_tensors(named, (rows, columns), dtype)
    return kind.of_tensors(named, (rows, columns), dtype)


def _packed_linear(x, format, tensors, rows, bias):
    product = _rows(matrix_of(format, tensors, rows, x.shape[-1], x.dtype), x, bias)
    return product.resize_(*x.shape[:-1], rows)  # not a view, because Falcon adds to its outputs in place


def _packed_gradient(gradient, format, tensors, columns):
    """Return `gradient @ W`, shapes (..., out) and (out, in). W is unpacked by blocks of rows, with sums in float32."""
    *lead, rows = gradient.shape
    matrix = matrix_of(format, tensors, rows, columns, gradient.dtype)
    flat = gradient.reshape(math.prod(lead), rows)
    total = flat.new_zeros(len(flat), columns, dtype=torch.float32)
    # On CPUs torch takes fifty times as long for bfloat16, unless the second matrix is transposed.
    wide = torch.float32 if flat.device.type == "cpu" else flat.dtype
    for block in row_blocks(rows, columns, SCRATCH_ROWS * columns):
        total += flat[:, block].to(wide) @ unpack(matrix.window(block.start, block.stop)).to(wide)
    return total.to(gradient.dtype).view(*lead, columns)


def _refuse_gradient(gradient):
    raise RuntimeError(REFUSAL)


def _setup_linear(ctx, inputs, output) -> None:
    x, ctx.format, tensors, _, _ = inputs
    ctx.columns = x.shape[-1]
    ctx.save_for_backward(*tensors)


def _linear_backward(ctx, gradient):
    tensors = list(ctx.saved_tensors)  # can be read once
    found = torch.ops.optimum_neuronal.packed_gradient(gradient, ctx.format, tensors, ctx.columns)
    return found, None, [None] * len(tensors), None, None


def _no_second_gradient(ctx, *gradients):
    raise RuntimeError("Packed weights have no second derivatives.")


# This key stands for every device.
LIBRARY.impl("packed_linear", _packed_linear, "CompositeExplicitAutograd")
LIBRARY.impl("packed_gradient", _packed_gradient, "CompositeExplicitAutograd")
LIBRARY.impl("block_gradient", torch.clone, "CompositeExplicitAutograd")
LIBRARY.impl("refuse_gradient", _refuse_gradient, "CompositeExplicitAutograd")

for _name, _fake in (
    ("packed_linear", lambda x, format, tensors, rows, bias: x.new_empty(*x.shape[:-1], rows)),
    ("packed_gradient", lambda x, format, tensors, columns: x.new_empty(*x.shape[:-1], columns)),
    ("block_gradient", torch.empty_like),
    ("refuse_gradient", torch.empty_like),
):
    torch.library.register_fake(f"optimum_neuronal::{_name}", _fake, lib=LIBRARY)

for _name, _backward, _setup in (
    ("packed_linear", _linear_backward, _setup_linear),
    ("packed_gradient", _no_second_gradient, None),
    ("block_gradient", lambda ctx, gradient: torch.ops.optimum_neuronal.refuse_gradient(gradient), None),
):
    torch.library.register_autograd(f"optimum_neuronal::{_name}", _backward, setup_context=_setup, lib=LIBRARY)
