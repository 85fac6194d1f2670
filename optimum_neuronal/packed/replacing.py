"""Puts modules in the place of others."""

from torch import nn


def replace_module(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Puts a module in the place of another, wherever the model holds that one."""
    for parent in model.modules():
        for key, child in parent._modules.items():
            if child is old:
                parent._modules[key] = new


def has_own_forward(module: nn.Module) -> bool:
    """Return True if somebody has given this very module another forward, as accelerate does to move inputs between devices."""
    return "forward" in vars(module)
