"""Operations on packed weights, for torch.compile and autograd: `torch.ops.optimum_neuronal.packed_linear` and others.

An operation takes a weight as its tensors: mask, values and offsets, or values, index, base and starts of a grouped one.
"""

import math
from collections.abc import Sequence

import torch

from .grouped_weight import GroupedWeight
from .packed_weight import PackedWeight
from .sparse_matrix import SCRATCH_ROWS, SparseMatrix, row_blocks


ADVICE = "call optimum_neuronal.densify(model) first"
REFUSAL = (
    f"The model's weights are packed and cannot be trained: to train them, {ADVICE}. To train LoRA on packed weights, "
    "call peft.get_peft_model(model, optimum_neuronal.lora_for_packed(model, config))."
)

LIBRARY = torch.library.Library("optimum_neuronal", "DEF")
for _schema in (
    "packed_linear(Tensor x, Tensor[] weight, Tensor? bias) -> Tensor",
    "packed_gradient(Tensor gradient, Tensor[] weight, int columns) -> Tensor",
    "block_gradient(Tensor x) -> Tensor",
    "refuse_gradient(Tensor gradient) -> Tensor",
):
    LIBRARY.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


def sparse_linear(weight: SparseMatrix, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return `x @ W.T + bias`, x (..., in), bias (out,), for a checked weight W (out, in). Gradients reach x only."""
    differentiated = x.requires_grad and torch.is_grad_enabled()
    if differentiated or type(x) is not torch.Tensor or torch.jit.is_tracing():
        return torch.ops.optimum_neuronal.packed_linear(x, weight.tensors(), bias)
    # Without torch's dispatch, which takes as long as the rest of a small product.
    return _multiply(weight, x, bias).view(*x.shape[:-1], weight.row_count)


def weight_of(tensors: Sequence[torch.Tensor], columns: int) -> SparseMatrix:
    """Return the weight of an operation's tensors, which a module has checked."""
    layout = PackedWeight if len(tensors) == 3 else GroupedWeight
    return layout(*tensors, (row_count(tensors), columns))


def row_count(tensors: Sequence[torch.Tensor]) -> int:
    """Return the rows of the weight that consists of these tensors."""
    return tensors[-1].shape[0] - 1


def _multiply(weight: SparseMatrix, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return the product as a new matrix (tokens, out), after checking x and the bias."""
    shape, columns, rows = x.shape, weight.shape[-1], weight.row_count
    if not shape or shape[-1] != columns:
        raise ValueError(f"x has shape {list(shape)}: expected (..., {columns})")
    if x.dtype != weight.dtype or x.device != weight.device:
        raise ValueError(f"x is {x.dtype} on {x.device}, but the weight {weight.dtype} on {weight.device}")
    if bias is not None:
        if (bias.dtype, bias.device, bias.shape) != (x.dtype, x.device, (rows,)):
            raise ValueError(f"the bias is {bias.dtype} of shape {list(bias.shape)}: expected {x.dtype} and [{rows}]")
        bias = bias.contiguous()
    flat = x if len(shape) == 2 else x.reshape(math.prod(shape[:-1]), columns)
    return weight.multiply(flat.contiguous(), bias)


def _packed_linear(x, tensors, bias):
    weight = weight_of(tensors, x.shape[-1])
    product = _multiply(weight, x, bias)
    return product.resize_(*x.shape[:-1], weight.row_count)  # not a view, because Falcon adds to its outputs in place


def _packed_gradient(gradient, tensors, columns):
    """Return `gradient @ W`, shapes (..., out) and (out, in). Make W dense by blocks of rows, and sum in float32."""
    *lead, rows = gradient.shape
    weight = weight_of(tensors, columns)
    flat = gradient.reshape(math.prod(lead), rows)
    total = flat.new_zeros(len(flat), columns, dtype=torch.float32)
    # On CPUs torch takes fifty times as long for bfloat16, unless the second matrix is transposed.
    dtype = torch.float32 if flat.device.type == "cpu" else flat.dtype
    for block in row_blocks(rows, columns, SCRATCH_ROWS * columns):
        total += flat[:, block].to(dtype) @ weight.window(block.start, block.stop).to_dense().to(dtype)
    return total.to(gradient.dtype).view(*lead, columns)


def _refuse_gradient(gradient):
    raise RuntimeError(REFUSAL)


def _setup_linear(ctx, inputs, output) -> None:
    x, tensors, _ = inputs
    ctx.columns = x.shape[-1]
    ctx.save_for_backward(*tensors)


def _linear_backward(ctx, gradient):
    tensors = ctx.saved_tensors  # can be read once
    of_x = torch.ops.optimum_neuronal.packed_gradient(gradient, tensors, ctx.columns)
    return of_x, [None] * len(tensors), None


def _no_second_gradient(ctx, *gradients):
    raise RuntimeError("Packed weights have no second derivatives.")


# This key stands for every device.
LIBRARY.impl("packed_linear", _packed_linear, "CompositeExplicitAutograd")
LIBRARY.impl("packed_gradient", _packed_gradient, "CompositeExplicitAutograd")
LIBRARY.impl("block_gradient", torch.clone, "CompositeExplicitAutograd")
LIBRARY.impl("refuse_gradient", _refuse_gradient, "CompositeExplicitAutograd")

for _name, _fake in (
    ("packed_linear", lambda x, tensors, bias: x.new_empty(*x.shape[:-1], row_count(tensors))),
    ("packed_gradient", lambda x, tensors, columns: x.new_empty(*x.shape[:-1], columns)),
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
