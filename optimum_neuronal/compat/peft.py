"""Private names of PEFT, which is imported only where adapters are found: its layers, and how they merge updates."""

import copy
import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.func import functional_call


Sparse = Any  # a weight with zeros to keep: `training.sparse_weights.SparseWeight`


def base_model(model: nn.Module) -> nn.Module:
    """Return the model inside of PEFT's `PeftModel`; any other model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]


def adapter_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return PEFT's outermost layers by the name of the module that each replaces."""
    layers: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in layers)
        if hasattr(module, "get_base_layer") and not inside:
            layers[name] = module
    return layers


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
    replaced = {name: updated_parameter(layer)[0] for name, layer in adapter_layers(model).items()}
    replaced |= copied_modules(model)
    paths = [name.rpartition(".") for name in replaced]
    places = [(model.get_submodule(parent), child) for parent, _, child in paths]
    layers = [getattr(parent, child) for parent, child in places]
    try:
        for (parent, child), module in zip(places, replaced.values()):
            setattr(parent, child, module)
        yield
    finally:
        for (parent, child), layer in zip(places, layers):
            setattr(parent, child, layer)


def guard_layer(layer: Any, weight: Sparse, exact: bool | None) -> bool:
    """Let a layer keep zeros at merging, and in the forward if `exact`; False if it does already and `exact` is None."""
    layer.sparse_weight = weight
    if exact is None and isinstance(layer, _GuardedMerge):
        return False
    own: Any = type(layer)
    # PEFT has no hook for this: a `LoraVariant` changes neither experts (`ParamWrapper`) nor methods other than LoRA.
    layer.__class__ = _subclass(_ExactLora if exact else _GuardedMerge, getattr(own, "peft_class", own))
    return True


@functools.lru_cache
def _subclass(kind: type, own: type) -> type:
    """Return a subclass of PEFT's class with the methods of `kind`."""
    return type(f"Sparse{own.__name__}", (kind, own), {"peft_class": own, "__module__": own.__module__})


def own_lora_config(config: Any) -> Any:
    """Return a copy of a `LoraConfig`, or the config of a saved adapter, by its path or Hub id."""
    from peft import LoraConfig

    if isinstance(config, (str, os.PathLike)):
        config = LoraConfig.from_pretrained(config)
    if not isinstance(config, LoraConfig):
        raise TypeError(
            f"Expected a LoraConfig, or the path or Hub id of a LoRA adapter, got a {type(config).__name__}."
        )
    return copy.deepcopy(config)


def adapt_packed(config: Any, kind: type) -> None:
    """Let a `LoraConfig` put LoRA around packed linear layers, of class `kind`."""
    config._register_custom_module({kind: _adapt_packed})


def _adapt_packed(*args: Any, **kwargs: Any) -> nn.Module:
    """Make a layer. It is a module-level function because a config is pickled with what it maps to."""
    from peft.tuners.lora.layer import Linear

    return _subclass(_PackedLora, Linear)(*args, **kwargs)


_PeftLayer: Any = object  # the classes below are mixed into classes of PEFT's


class _PackedLora(_PeftLayer):
    """A LoRA layer around a packed linear layer."""

    def __init__(self, base_layer: Any, adapter_name: str, config: Any, **kwargs: Any):
        base = base_layer.get_base_layer() if hasattr(base_layer, "get_base_layer") else base_layer
        config.fan_in_fan_out = base.transposed  # as PEFT does it for dense layers
        kwargs["is_target_conv_1d_layer"] = base.transposed
        super().__init__(base_layer, adapter_name, config=config, **kwargs)

    def _is_packed(self) -> bool:
        return hasattr(self.get_base_layer(), "passes_gradients")

    def _get_in_out_features(self, module: Any) -> tuple[int, int]:
        return module.in_features, module.out_features

    def resolve_lora_variant(self, *, config: Any, **kwargs: Any) -> None:
        variant = super().resolve_lora_variant(config=config, **kwargs)
        if variant is not None and self._is_packed():
            raise ValueError(
                f"The adapter is a {type(variant).__name__}, but packed weights support LoRA and rsLoRA only: change the "
                "LoraConfig, or call optimum_neuronal.densify(model) first."
            )
        return variant

    def merge(self, *args: Any, **kwargs: Any) -> None:
        if self._is_packed():
            raise ValueError(
                "Adapters cannot be merged into packed weights: call optimum_neuronal.densify(model) first, and "
                "optimum_neuronal.keep_lora_sparse(model) to keep the zeros."
            )
        super().merge(*args, **kwargs)


class _GuardedMerge(_PeftLayer):
    """An adapter layer that sets pruned weights to zero again after merging and unmerging."""

    sparse_weight: Sparse

    def merge(self, *args: Any, **kwargs: Any) -> None:
        super().merge(*args, **kwargs)
        with torch.no_grad():
            self.sparse_weight.apply()

    def unmerge(self) -> None:
        super().unmerge()
        with torch.no_grad():
            self.sparse_weight.apply()


class _ExactLora(_GuardedMerge):
    """A LoRA layer whose forward computes with the weight that merging would make."""

    def get_delta_weight(self, adapter: str, *args: Any, **kwargs: Any) -> torch.Tensor:
        with torch.autocast(self.sparse_weight.owner.device.type, enabled=False):  # merging happens without it
            return self.sparse_weight.masked(super().get_delta_weight(adapter, *args, **kwargs))

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        adapters = [adapter for adapter in self.active_adapters if adapter in self.lora_A]
        if self.disable_adapters or self.merged or not adapters:
            return super().forward(x, *args, **kwargs)
        if any(kwargs.pop(key, None) is not None for key in ("adapter_names", "alora_offsets")):
            raise ValueError("keep_lora_sparse does not support batches with several adapters: use exact=False.")
        weight: torch.Tensor = self.sparse_weight.owner
        dropped = []
        for adapter in adapters:
            if self.training and getattr(self.lora_dropout[adapter], "p", 0):
                dropped.append(adapter)
            else:
                weight = weight + self.get_delta_weight(adapter)
        result = self._compute(weight.to(self.sparse_weight.owner.dtype), x, args, kwargs)
        for adapter in dropped:
            update = self.get_delta_weight(adapter).to(x.dtype)
            result = result + self._compute(update, self.lora_dropout[adapter](x), args, kwargs, bias=False)
        for adapter in adapters:
            if self.lora_bias[adapter]:
                result = result + (self.lora_B[adapter].bias * self.scaling[adapter]).to(result.dtype)
        return result

    def _compute(
        self, weight: torch.Tensor, x: torch.Tensor, args: tuple, kwargs: dict, bias: bool = True
    ) -> torch.Tensor:
        """Return the output of the base layer, or of a nested adapter layer around it, with another weight."""
        path, layer = "", self.base_layer
        while hasattr(layer, "get_base_layer"):
            path, layer = f"{path}base_layer.", layer.base_layer
        tensors = {f"{path}{self.sparse_weight.parameter}": weight}
        if not bias and getattr(layer, "bias", None) is not None:
            tensors[f"{path}bias"] = torch.zeros_like(layer.bias)
        return functional_call(self.base_layer, tensors, (x, *args), kwargs)


def check_understood(layer: Any) -> None:
    """Raise `ValueError` for an adapter whose update is not a product of LoRA's two matrices."""
    from peft.tuners.lora.layer import Linear, ParamWrapper

    if not isinstance(layer, (Linear, ParamWrapper)):
        raise ValueError(
            f"`exact=True` supports LoRA only, but the model has a {type(layer).__module__}.{type(layer).__name__}: use "
            "keep_lora_sparse(model, exact=False), which keeps the zeros when adapters are merged."
        )
    for name, variant in layer.lora_variant.items():
        raise ValueError(
            f"`exact=True` supports LoRA and rsLoRA only, but the adapter {name!r} is a {type(variant).__name__}: use "
            "keep_lora_sparse(model, exact=False)."
        )
