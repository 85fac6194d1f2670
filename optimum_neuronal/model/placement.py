"""Where the weights of a model live, and where it computes: some may wait in CPU memory or on disk (accelerate's offloading)."""

import torch
from torch import nn

from .projections import Projection


def is_offloaded(module: nn.Module) -> bool:
    """Whether the module's own weights are read by a hook of accelerate's."""
    return getattr(getattr(module, "_hf_hook", None), "offload", False)


def execution_device(module: nn.Module) -> torch.device:
    """Where a module with weights computes, wherever they live."""
    if is_offloaded(module):
        return torch.device(module._hf_hook.execution_device)
    return next(module.parameters()).device


def stored_weight(projection: Projection) -> torch.Tensor:
    """A projection's weight, shape (out, in), where it lives: a view of a file for one on disk."""
    if not is_offloaded(projection.module):
        return projection.weight
    return projection.view(projection.module._hf_hook.weights_map[projection.parameter])


def default_device() -> torch.device:
    """Where to compute if nobody says: the accelerator, or the CPU."""
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
