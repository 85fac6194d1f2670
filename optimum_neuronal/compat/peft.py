"""Private names of PEFT: its layers around the modules of a model, and how they merge updates into weights.

PEFT itself is imported only where adapters are found.
"""

import copy
import functools
import os
from collections.abc import Callable, Iterator
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
    """Return PEFT's outermost layers around modules of a model, by the name of the module that each replaces."""
    layers: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in layers)
        if hasattr(module, "get_base_layer") and not inside:
            layers[name] = module
    return layers


def all_adapter_layers(model: nn.Module) -> Iterator[Any]:
    """Yield PEFT's layers, of nested layers all."""
    layer: Any  # with attributes of PEFT's
    for layer in adapter_layers(model).values():
        while hasattr(layer, "get_base_layer"):
            yield layer
            layer = layer.base_layer


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
    parents = {name: model.get_submodule(name.rpartition(".")[0]) for name in replaced}
    layers = {name: parents[name]._modules[name.rpartition(".")[2]] for name in replaced}
    try:
        for name, module in replaced.items():
            parents[name]._modules[name.rpartition(".")[2]] = module
        yield
    finally:
        for name, layer in layers.items():
            parents[name]._modules[name.rpartition(".")[2]] = layer


def unguarded_layers(model: nn.Module) -> list[Any]:
    """Return PEFT's layers that [`guard_layer`] has not changed."""
    return [m for m in model.modules() if hasattr(m, "get_base_layer") and not isinstance(m, _GuardedMerge)]


def guard_layer(layer: Any, weight: Sparse, before_merge: Callable[[], None], exact: bool | None) -> bool:
    """Make an adapter layer keep the zeros of the weight that it updates when it is merged.

    Args:
        layer: of PEFT; its class becomes a subclass of its own.
        weight (`SparseWeight`): the weight that it updates.
        before_merge (`Callable`): called before each merge; it is copied and pickled with the layer.
        exact (`bool`, *optional*):
            True: the forward leaves out the update of pruned weights too. None: as before if the layer is guarded.

    Returns:
        `bool`: False if the layer stays as it was.
    """
    layer.sparse_weight, layer.before_merge = weight, before_merge
    if exact is None and isinstance(layer, _GuardedMerge):
        return False
    own: Any = type(layer)
    layer.__class__ = _subclass(_ExactLora if exact else _GuardedMerge, getattr(own, "peft_class", own))
    return True


@functools.lru_cache
def _subclass(kind: type, own: type) -> type:
    """Return PEFT's class with our methods before its own, so that a layer stays an instance of it."""
    members = {"kind": kind, "peft_class": own, "__module__": own.__module__}
    return type(f"Sparse{own.__name__}", (kind, own), members)


def _new_layer(kind: type, own: type) -> nn.Module:
    """Return a layer without attributes, for pickle, which cannot find the class by its name."""
    cls: Any = _subclass(kind, own)
    return cls.__new__(cls)


def own_lora_config(config: Any) -> Any:
    """Return a copy of a `LoraConfig`, or that of a saved adapter, by its path or Hub id."""
    from peft import LoraConfig

    if isinstance(config, (str, os.PathLike)):
        config = LoraConfig.from_pretrained(config)
    if not isinstance(config, LoraConfig):
        raise TypeError(f"Expected a LoraConfig or where an adapter of LoRA is saved, got a {type(config).__name__}.")
    return copy.deepcopy(config)


def adapt_packed(config: Any, kind: type) -> None:
    """Let a `LoraConfig` put LoRA around packed linear layers, of class `kind`, by PEFT's mapping of custom modules."""
    config._register_custom_module({kind: _adapt_packed})


def _adapt_packed(*args: Any, **kwargs: Any) -> nn.Module:
    """Make a layer; a function, since a config is pickled with what it maps to."""
    from peft.tuners.lora.layer import Linear

    return _subclass(_PackedLora, Linear)(*args, **kwargs)


_PeftLayer: Any = object  # the classes below are mixed into classes of PEFT's


class _Pickled(_PeftLayer):
    """A layer of a class that [`_subclass`] made."""

    kind: type
    peft_class: type

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        _, _, *state = super().__reduce_ex__(protocol)
        return _new_layer, (self.kind, self.peft_class), *state


class _PackedLora(_Pickled):
    """A layer of LoRA around a packed linear layer, whose weight stays packed, or is made dense later by `densify`."""

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
                f"The adapter is a {type(variant).__name__}, but beside packed weights LoRA and rsLoRA are understood alone: "
                "leave that out of the LoraConfig, or call optimum_neuronal.densify(model) first."
            )
        return variant

    def merge(self, *args: Any, **kwargs: Any) -> None:
        if self._is_packed():
            raise ValueError(
                "The model's weights are packed, and adapters cannot be merged into packed weights: call "
                "optimum_neuronal.densify(model) first, and optimum_neuronal.keep_lora_sparse(model) to keep the zeros."
            )
        super().merge(*args, **kwargs)


class _GuardedMerge(_Pickled):
    """An adapter layer that puts the zeros of its base weight back after merging and unmerging.

    This equals merging an update that is zero there: the pruned weights were zero before.
    """

    sparse_weight: Sparse
    before_merge: Callable[[], None]

    def merge(self, *args: Any, **kwargs: Any) -> None:
        self.before_merge()
        super().merge(*args, **kwargs)
        self._put_zeros_back()

    def unmerge(self) -> None:
        super().unmerge()
        self._put_zeros_back()

    @torch.no_grad()
    def _put_zeros_back(self) -> None:
        self.sparse_weight.apply()


class _ExactLora(_GuardedMerge):
    """A layer of LoRA whose forward computes with the weight that merging would make."""

    def get_delta_weight(self, adapter: str, *args: Any, **kwargs: Any) -> torch.Tensor:
        with torch.autocast(self.sparse_weight.owner.device.type, enabled=False):  # merging happens without it
            return self.sparse_weight.masked(super().get_delta_weight(adapter, *args, **kwargs))

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        adapters = [adapter for adapter in self.active_adapters if adapter in self.lora_A]
        if self.disable_adapters or self.merged or not adapters:
            return super().forward(x, *args, **kwargs)
        if any(kwargs.pop(key, None) is not None for key in ("adapter_names", "alora_offsets")):
            raise ValueError("keep_lora_sparse: batches of several adapters are not understood. Use exact=False.")
        weight: torch.Tensor = self.sparse_weight.owner
        dropped = []
        for adapter in adapters:
            if self.training and getattr(self.lora_dropout[adapter], "p", 0):
                dropped.append(adapter)
            else:
                weight = weight + self._update(adapter, len(adapters))
        result = self._compute(weight.to(self.sparse_weight.owner.dtype), x, args, kwargs)
        for adapter in dropped:
            update = self._update(adapter, len(adapters)).to(x.dtype)
            result = result + self._compute(update, self.lora_dropout[adapter](x), args, kwargs, bias=False)
        for adapter in adapters:
            if self.lora_bias[adapter]:
                result = result + (self.lora_B[adapter].bias * self.scaling[adapter]).to(result.dtype)
        return result

    def _update(self, adapter: str, active: int) -> torch.Tensor:
        """Return what merging the adapter would add to the weight, in the weight's layout."""
        update = self.get_delta_weight(adapter)
        if adapter not in self.lora_variant:
            return update
        if active > 1:
            raise ValueError(
                "keep_lora_sparse: DoRA is understood only as the single active adapter. Use exact=False."
            )
        weight, transposed = self.sparse_weight.owner, self.fan_in_fan_out
        magnitude = self.lora_magnitude_vector[adapter]
        with torch.autocast(weight.device.type, enabled=False):
            norm = magnitude.get_weight_norm(weight, update.T if transposed else update, scaling=1).detach()
            factor = (magnitude.weight / norm).view((1, -1) if transposed else (-1, 1))
            return factor * (weight + update) - weight

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
    """Raise `ValueError` for an adapter whose update is not known as a change of the weight."""
    from peft.tuners.lora.layer import Linear, ParamWrapper
    from peft.tuners.lora.variants import DoraLinearVariant

    if not isinstance(layer, (Linear, ParamWrapper)):
        raise ValueError(
            f"Exactly merged can only be LoRA, but the model carries {type(layer).__module__}.{type(layer).__name__}: call "
            "keep_lora_sparse(model, exact=False), which keeps the zeros at merging."
        )
    for name, variant in layer.lora_variant.items():
        if not isinstance(variant, DoraLinearVariant):
            raise ValueError(
                f"Of LoRA's variants only DoRA and rsLoRA are understood, but the adapter {name!r} is a "
                f"{type(variant).__name__}: call keep_lora_sparse(model, exact=False)."
            )
