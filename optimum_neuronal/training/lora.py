"""LoRA on a sparse model: merging keeps every zero, and training sees what will be merged.

An update `scaling * B @ A` is dense, so that merging it fills the zeros. Here the part of it that falls on pruned
weights is left out when it is merged (of any of PEFT's methods), and, by [`keep_lora_sparse`], in the forward too: the
adapter then learns to do without that part, and the merged model computes what the trained one did.
"""

import functools
import importlib.util
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from .sparse_weights import SparseWeight, adapter_layers, find_sparse_weights, unwrap


def keep_lora_sparse(model: nn.Module, exact: bool = True) -> nn.Module:
    """Lets `merge_and_unload` and `merge_adapter` of a sparse model with adapters keep every zero.

    Call it on what `get_peft_model` or `PeftModel.from_pretrained` returned, before training or merging. Nothing of it
    is saved, so it is called again after loading. LoRA, rsLoRA, DoRA and `target_parameters` (experts) are understood.

    Args:
        model (`PeftModel`): or a transformers model with adapters (`add_adapter`); changed in place.
        exact (`bool`):
            Leave out the update of pruned weights in the forward as well, so that merging does not change what the
            model computes. Until it is merged each adapted projection then computes with a weight made anew for every
            forward, which takes the memory of a copy of it until the backward (gradient checkpointing frees it). False:
            only at merging, which works for all of PEFT's methods; the merged model lacks what the update of pruned
            weights did.

    Returns:
        The same model.

    Raises:
        `ImportError`: peft is not installed.
        `TypeError`: no model.
        `ValueError`: no adapters, merged adapters, a dense model, or with `exact` an adapter that is not understood.
    """
    check_peft()
    unwrap(model)  # or what is no model would carry no adapters
    layers = list(_all_layers(model))
    if not layers:
        raise ValueError("The model carries no adapters: call keep_lora_sparse on what peft.get_peft_model returns.")
    if any(layer.merged for layer in layers):
        raise ValueError("Adapters are merged already: call unmerge_adapter() first.")
    weights = find_sparse_weights(model)
    if exact:
        for layer in _layers_of(layers, weights):
            _check_understood(layer)
        _check_own_weights(layers)
    guard_merging(model, weights, _ExactLora if exact else _GuardedMerge)
    return model


def check_peft() -> None:
    """Raises `ImportError` if peft is not installed."""
    if importlib.util.find_spec("peft") is None:
        raise ImportError("Adapters need peft: pip install optimum-neuronal[peft]")


def guard_merging(model: nn.Module, weights: list[SparseWeight], kind: type | None = None) -> bool:
    """Makes the adapter layers around sparse weights keep their zeros at merging; does nothing without adapters.

    Args:
        model (`nn.Module`): with or without adapters.
        weights (`list[SparseWeight]`): of the model.
        kind (`type`, *optional*): what a layer becomes; None: guarded, or what it is already.

    Returns:
        `bool`: whether a layer was guarded that was not before.
    """
    anew = False
    for layer, weight in _layers_of(list(_all_layers(model)), weights).items():
        layer.sparse_weight = weight
        if kind is not None or not isinstance(layer, _GuardedMerge):
            anew = True
            own: Any = type(layer)
            layer.__class__ = _subclass(kind or _GuardedMerge, getattr(own, "peft_class", own))
    return anew


def _all_layers(model: nn.Module) -> Iterator[Any]:
    """PEFT's layers, of nested ones all."""
    layer: Any  # with attributes of PEFT's
    for layer in adapter_layers(model).values():
        while hasattr(layer, "get_base_layer"):
            yield layer
            layer = layer.base_layer


def _layers_of(layers: list[Any], weights: list[SparseWeight]) -> dict[Any, SparseWeight]:
    """Adapter layer -> the sparse weight that it updates."""
    by_owner = {(weight.module, weight.parameter): weight for weight in weights}
    updated = {layer: by_owner.get((layer.get_base_layer(), _parameter(layer))) for layer in layers}
    return {layer: weight for layer, weight in updated.items() if weight is not None}


def _parameter(layer: nn.Module) -> str:
    """Name of the parameter that an adapter layer updates in its base layer."""
    return getattr(layer, "parameter_name", "weight")


@functools.lru_cache
def _subclass(kind: type, own: type) -> type:
    """PEFT's class with our methods before its own, so that a layer stays an instance of it."""
    members = {"kind": kind, "peft_class": own, "__module__": own.__module__}
    return type(f"Sparse{own.__name__}", (kind, own), members)


def _new_layer(kind: type, own: type) -> nn.Module:
    """A layer without attributes, for a pickle: the class of such a layer cannot be found by its name."""
    cls: Any = _subclass(kind, own)
    return cls.__new__(cls)


_PeftLayer: Any = object  # whichever of PEFT's the classes below are mixed into


class _GuardedMerge(_PeftLayer):
    """An adapter layer that puts the zeros of its base weight back after merging and unmerging.

    That is the same as to merge an update that is zero there: the pruned weights were zero before.
    """

    sparse_weight: SparseWeight
    kind: type
    peft_class: type

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        _, _, *state = super().__reduce_ex__(protocol)
        return _new_layer, (self.kind, self.peft_class), *state

    def merge(self, *args: Any, **kwargs: Any) -> None:
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
        """What merging the adapter would add to the weight."""
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
        """What the base layer, or a nested adapter layer around it, computes with another weight."""
        path, layer = "", self.base_layer
        while hasattr(layer, "get_base_layer"):
            path, layer = f"{path}base_layer.", layer.base_layer
        tensors = {f"{path}{self.sparse_weight.parameter}": weight}
        if not bias and getattr(layer, "bias", None) is not None:
            tensors[f"{path}bias"] = torch.zeros_like(layer.bias)
        return functional_call(self.base_layer, tensors, (x, *args), kwargs)


def _check_understood(layer: Any) -> None:
    """Raises `ValueError` for adapters whose update is not known as a change of the weight."""
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


def _check_own_weights(layers: list[Any]) -> None:
    """Raises `ValueError` if two adapter layers update the same weight: merging adds both updates to it."""
    modules: dict[int, nn.Module] = {}
    for layer in layers:
        base = layer.get_base_layer()
        if modules.setdefault(id(getattr(base, _parameter(layer))), base) is not base:
            raise ValueError(
                "Several layers share their weights (layer_replication), so that merging adds the updates of all to each: "
                "replicate the layers of the model itself; or call keep_lora_sparse(model, exact=False), and do not merge."
            )
