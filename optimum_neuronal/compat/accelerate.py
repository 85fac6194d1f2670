"""Private names of accelerate: the hook of a module whose weights wait in CPU memory or on disk (offloading).

An offloaded module holds meta tensors. Its hook has a `weights_map`, name -> tensor, and reads the weights at every
forward.
"""

from collections.abc import Callable, Mapping

import torch
from torch import nn


def is_offloaded(module: nn.Module) -> bool:
    """Return True if a hook of accelerate reads the module's own weights."""
    return getattr(getattr(module, "_hf_hook", None), "offload", False)


def execution_device(module: nn.Module) -> torch.device:
    """Return the device on which a module with weights computes, wherever its weights are."""
    if is_offloaded(module):
        return torch.device(module._hf_hook.execution_device)
    return next(module.parameters()).device


def weights_map(module: nn.Module) -> Mapping[str, torch.Tensor]:
    """Return the mapping from which an offloaded module's hook reads its weights: views of a file if they are on disk."""
    return module._hf_hook.weights_map


def set_weights_map(module: nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    module._hf_hook.weights_map = weights


def offloaded_names(module: nn.Module) -> list[str]:
    """Return the names of the parameters that the hook of an offloaded module reads."""
    parameters = module.named_parameters(recurse=module._hf_hook.place_submodules)
    return [name for name, tensor in parameters if tensor.is_meta]


def own_forward(module: nn.Module) -> Callable:
    """Return the forward that the hook of an offloaded module calls after reading the weights."""
    return module._old_forward
