"""Private names of PEFT, found without importing it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


def base_model(model: nn.Module) -> nn.Module:
    """Return the model inside PEFT's `PeftModel`, or any other model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]


def all_adapter_layers(model: nn.Module) -> Iterator[Any]:
    """Return PEFT's layers, including nested ones, the outer before the inner."""
    return (module for module in model.modules() if hasattr(module, "get_base_layer"))


def updated_parameter(layer: Any) -> tuple[nn.Module, str]:
    """Return the module whose parameter an adapter layer updates, and the parameter's name in it."""
    return layer.get_base_layer(), getattr(layer, "parameter_name", "weight")


def copied_modules(model: nn.Module) -> dict[str, Any]:
    """Return the modules of which PEFT trains a copy (`modules_to_save`), by name."""
    return {
        name: module.original_module
        for name, module in model.named_modules()
        if hasattr(module, "original_module") and hasattr(module, "modules_to_save")
    }


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Put the modules that PEFT's layers replaced back into the model while the context lasts."""
    replaced: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if hasattr(module, "get_base_layer") and not any(name.startswith(f"{outer}.") for outer in replaced):
            replaced[name] = module.get_base_layer()
    replaced |= copied_modules(model)
    layers = {name: model.get_submodule(name) for name in replaced}
    try:
        for name, module in replaced.items():
            model.set_submodule(name, module)
        yield
    finally:
        for name, layer in reversed(layers.items()):  # outer modules first
            model.set_submodule(name, layer)
