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


def sparse_linear(
    weight: SparseMatrix, x: torch.Tensor, bias: torch.Tensor | None = None, passes_gradients: bool = True
) -> torch.Tensor:
    """Return `x @ W.T + bias`, x (..., in), bias (out,), for a checked weight W (out, in). Gradients reach x only.

    Unless it `passes_gradients`, a backward raises `RuntimeError`.
    """
    differentiated = x.requires_grad and torch.is_grad_enabled()
    if differentiated or type(x) is not torch.Tensor or torch.jit.is_tracing():
        return torch.ops.optimum_neuronal.packed_linear(x, weight.tensors(), bias, passes_gradients)
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


def _packed_linear(x, weight, bias, passes_gradients):
    product = _multiply(weight_of(weight, x.shape[-1]), x, bias)
    return product.resize_(*x.shape[:-1], row_count(weight))  # not a view, because Falcon adds to its outputs in place


def _empty_product(x, weight, bias, passes_gradients):
    return x.new_empty(*x.shape[:-1], row_count(weight))


@torch.library.custom_op("optimum_neuronal::packed_gradient", mutates_args=())
def packed_gradient(
    gradient: torch.Tensor, weight: Sequence[torch.Tensor], columns: int, passes_gradients: bool
) -> torch.Tensor:
    """Return `gradient @ W`, shapes (..., out) and (out, in). Make W dense by blocks of rows, and sum in float32."""
    if not passes_gradients:
        raise RuntimeError(REFUSAL)
    *lead, rows = gradient.shape
    matrix, flat = weight_of(weight, columns), gradient.reshape(math.prod(lead), rows)
    total = flat.new_zeros(len(flat), columns, dtype=torch.float32)
    # On CPUs torch takes fifty times as long for bfloat16, unless the second matrix is transposed.
    dtype = torch.float32 if flat.device.type == "cpu" else flat.dtype
    for block in row_blocks(rows, columns, SCRATCH_ROWS * columns):
        total += flat[:, block].to(dtype) @ matrix.window(block.start, block.stop).to_dense().to(dtype)
    return total.to(gradient.dtype).view(*lead, columns)


@packed_gradient.register_fake
def _(gradient, weight, columns, passes_gradients):
    return gradient.new_empty(*gradient.shape[:-1], columns)


def _keep_weight(ctx, inputs, output) -> None:
    x, tensors, _, passes_gradients = inputs
    ctx.columns, ctx.passes_gradients = x.shape[-1], passes_gradients
    ctx.save_for_backward(*tensors)


def _linear_backward(ctx, gradient):
    tensors = ctx.saved_tensors  # can be read once
    return packed_gradient(gradient, tensors, ctx.columns, ctx.passes_gradients), [None] * len(tensors), None, None


def _no_second_gradient(ctx, *gradients):
    raise RuntimeError("Packed weights have no second derivatives.")


packed_gradient.register_autograd(_no_second_gradient)
# Not a custom_op, whose wrapper takes a third as long again as a small product.
LIBRARY = torch.library.Library("optimum_neuronal", "FRAGMENT")
LIBRARY.define(
    "packed_linear(Tensor x, Tensor[] weight, Tensor? bias, bool passes_gradients) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
LIBRARY.impl("packed_linear", _packed_linear, "CompositeExplicitAutograd")  # for every device
torch.library.register_fake("optimum_neuronal::packed_linear", _empty_product, lib=LIBRARY)
torch.library.register_autograd(
    "optimum_neuronal::packed_linear", _linear_backward, setup_context=_keep_weight, lib=LIBRARY
)
