"""LoRA on a sparse model: merging keeps every zero.

An update `scaling * B @ A` is dense, so merging it fills the zeros. Here merging leaves out the update of pruned weights.
[`keep_lora_sparse`] leaves it out in the forward too, so the merged model computes what the trained model did.
"""

import importlib.util
from typing import Any

from torch import nn

from ..compat import peft
from .sparse_weights import SparseWeight, find_sparse_weights, unwrap


def keep_lora_sparse(model: nn.Module, exact: bool = True) -> nn.Module:
    """Make `merge_and_unload` and `merge_adapter` of a sparse model with adapters keep every zero.

    Call it on the result of `get_peft_model` or `PeftModel.from_pretrained`, before training or merging. It is not saved:
    call it again after loading, and after adding an adapter.

    Args:
        model (`PeftModel`): or a transformers model with adapters (`add_adapter`); changed in place.
        exact (`bool`):
            True: the forward leaves out the update of pruned weights too, so merging does not change what the model
            computes. Supports LoRA, rsLoRA and `target_parameters` (experts). Each adapted projection makes a new weight
            in every forward, and keeps it until the backward. False: only merging leaves it out, for any PEFT method, so
            the merged model differs from the trained one.

    Returns:
        The same model.

    Raises:
        `ImportError`: peft is not installed.
        `TypeError`: not a model.
        `ValueError`: the model has no adapters on pruned weights, merged adapters, or no zeros; or with `exact` an adapter
            that is not supported.
    """
    check_peft()
    unwrap(model)  # raises before adapters are looked for
    layers = list(peft.all_adapter_layers(model))
    if not layers:
        raise ValueError("The model has no adapters: call keep_lora_sparse on the result of peft.get_peft_model.")
    if any(layer.merged for layer in layers):
        raise ValueError("The adapters are merged already: call unmerge_adapter() first.")
    weights = find_sparse_weights(model)
    guarded = _weight_of_layer(layers, weights)
    if not guarded:
        raise ValueError("No adapter updates a pruned weight: leave out keep_lora_sparse.")
    if exact:
        for layer in guarded:
            peft.check_understood(layer)
    guard_merging(model, weights, exact)
    return model


def check_peft() -> None:
    """Raise `ImportError` if peft is not installed."""
    if importlib.util.find_spec("peft") is None:
        raise ImportError("Adapters need peft: pip install optimum-neuronal[peft]")


def guard_merging(model: nn.Module, weights: list[SparseWeight], exact: bool | None = None) -> bool:
    """Let adapter layers keep the zeros at merging; return True if a layer changed. None: guarded layers stay as they are."""
    found = _weight_of_layer(list(peft.all_adapter_layers(model)), weights)
    return any([peft.guard_layer(layer, weight, exact) for layer, weight in found.items()])


def _weight_of_layer(layers: list[Any], weights: list[SparseWeight]) -> dict[Any, SparseWeight]:
    """Return adapter layer -> the sparse weight that it updates."""
    by_owner = {(weight.module, weight.parameter): weight for weight in weights}
    updated = {layer: by_owner.get(peft.updated_parameter(layer)) for layer in layers}
    return {layer: weight for layer, weight in updated.items() if weight is not None}
