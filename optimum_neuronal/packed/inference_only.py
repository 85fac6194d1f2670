"""Packed weights are not trained: what asks for gradients is refused, in a graph of torch.compile too, unless adapters are.

An output that autograd would lead through packed weights is marked here. It may be looked at, and losses may be
computed of it; a backward through it is an error. Else all other weights would be trained beside the packed ones, and
no error would say that these are not. Where adapters are trained, all weights are frozen, and gradients pass.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad


ADVICE = "call optimum_neuronal.densify(model) first"
REFUSAL = (
    f"The model's weights are packed, and packed weights compute no gradients: to train it, {ADVICE}. To train LoRA beside "
    "packed weights, call peft.get_peft_model(model, optimum_neuronal.lora_for_packed(model, config))."
)


class Adapters:
    """The adapter layers around packed weights of a model, shared by its packed modules; true while there are any.

    A copied or unpickled model has its own, to which its layers add themselves.

    Attributes:
        count (`int`): of layers that are in memory; a number, since graphs of torch.compile depend on it.
    """

    def __init__(self) -> None:
        self.count = 0

    def add(self, layer: nn.Module) -> None:
        """Count a layer as long as it lives."""
        self.count += 1
        weakref.finalize(layer, self._lose).atexit = False

    def _lose(self) -> None:
        self.count -= 1

    def __bool__(self) -> bool:
        return self.count > 0

    def __reduce__(self) -> tuple:
        return Adapters, ()


def watched(module: Any, x: torch.Tensor) -> bool:
    """Return True if autograd waits for a gradient of `x` that packed weights have to refuse.

    Args:
        module (`nn.Module`): a packed one, with the attribute `adapters`.
        x (`Tensor`): its input.

    Raises:
        `RuntimeError`: the module is being trained, or a transform of torch.func differentiates, or `x` carries a tangent
            (forward-mode AD).
    """
    compiling = torch.compiler.is_compiling()
    carries = not compiling and forward_ad.unpack_dual(x).tangent is not None
    if not (carries or torch.is_grad_enabled() and x.requires_grad) or module.adapters:
        return False
    if module.training or carries or not compiling and is_transformed():
        raise RuntimeError(REFUSAL)
    return True


def is_transformed() -> bool:
    """Return True inside of a transform of torch.func, such as `vmap` and `grad`."""
    return torch._C._are_functorch_transforms_active()


def is_differentiated(x: torch.Tensor) -> bool:
    """Return True if autograd, forward-mode AD or a transform of torch.func follows what is computed of `x`."""
    wanted = torch.is_grad_enabled() and x.requires_grad
    return wanted or is_transformed() or forward_ad.unpack_dual(x).tangent is not None


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
