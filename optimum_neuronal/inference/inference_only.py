"""Packed weights compute no gradients: what asks for them is refused, in a graph of torch.compile too.

An output that autograd would lead through packed weights is marked here. It may be looked at, and losses may be
computed of it; a backward through it is an error, where a missing formula would make gradients silently incomplete.
"""

from collections.abc import Sequence

import torch
from torch import nn
from torch.autograd import forward_ad


ADVICE = "call optimum_neuronal.densify(model) first"
REFUSAL = f"The model's weights are packed, and packed weights compute no gradients: to train it, {ADVICE}."


def watched(module: nn.Module, x: torch.Tensor) -> bool:
    """Return True if autograd waits for a gradient of `x`.

    Raises:
        `RuntimeError`: the module is being trained, or `x` carries a tangent (`torch.func.jvp`, forward-mode AD).
    """
    if not torch.compiler.is_compiling() and forward_ad.unpack_dual(x).tangent is not None:
        raise RuntimeError(REFUSAL)
    if not (torch.is_grad_enabled() and x.requires_grad):
        return False
    if module.training:
        raise RuntimeError(REFUSAL)
    return True


def mark(output: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A copy of an output computed without autograd; a backward through it to `x` raises `RuntimeError`."""
    return torch.ops.optimum_neuronal.inference_only(output, x)


@torch.library.custom_op("optimum_neuronal::inference_only", mutates_args=())
def _inference_only(output: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return output.clone()


@_inference_only.register_fake
def _(output, x):
    return torch.empty_like(output)


@torch.library.custom_op("optimum_neuronal::refuse_gradient", mutates_args=())
def _refuse_gradient(gradient: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    raise RuntimeError(REFUSAL)


@_refuse_gradient.register_fake
def _(gradient, shape):
    return gradient.new_empty(shape)


def _keep_shape(ctx, inputs, output) -> None:
    ctx.shape = inputs[1].shape


def _backward(ctx, gradient):
    return None, torch.ops.optimum_neuronal.refuse_gradient(gradient, ctx.shape)


_inference_only.register_autograd(_backward, setup_context=_keep_shape)
