"""LoRA on a sparse model: merging keeps every zero, and training sees the weights that will be merged.

An update `scaling * B @ A` is dense, so that merging it fills the zeros. Here the update of pruned weights is left out
when it is merged (by any of PEFT's methods), and, by [`keep_lora_sparse`], in the forward too: the adapter then learns
without it, and the merged model computes what the trained one did.
"""

import importlib.util
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..common.notes import get_logger
from ..compat import peft
from .sparse_weights import SparseWeight, find_sparse_weights, unwrap


logger = get_logger(__name__)


def keep_lora_sparse(model: nn.Module, exact: bool = True) -> nn.Module:
    """Let `merge_and_unload` and `merge_adapter` of a sparse model with adapters keep every zero.

    Call it on the result of `get_peft_model` or `PeftModel.from_pretrained`, before training or merging. It leaves
    nothing in saved files, so call it again after loading, and after adding an adapter: else the merge of an added one
    keeps the zeros too, but its forward is not exact, of which a warning is given. LoRA, rsLoRA, DoRA and
    `target_parameters` (experts) are understood.

    Args:
        model (`PeftModel`): or a transformers model with adapters (`add_adapter`); changed in place.
        exact (`bool`):
            Leave out the update of pruned weights in the forward as well, so that merging does not change what the
            model computes. Until it is merged each adapted projection then computes with a weight made anew for every
            forward, which takes the memory of a copy of it until the backward (gradient checkpointing frees it). False:
            only at merging, which works for all of PEFT's methods; the merged model lacks the update of pruned weights.

    Returns:
        The same model.

    Raises:
        `ImportError`: peft is not installed.
        `TypeError`: no model.
        `ValueError`: no adapters, none on a pruned weight, merged adapters, a dense model, or with `exact` an adapter that
            is not understood.
    """
    check_peft()
    unwrap(model)  # raises for what is no model, before adapters are looked for
    layers = list(peft.all_adapter_layers(model))
    if not layers:
        raise ValueError("The model carries no adapters: call keep_lora_sparse on what peft.get_peft_model returns.")
    if any(layer.merged for layer in layers):
        raise ValueError("Adapters are merged already: call unmerge_adapter() first.")
    weights = find_sparse_weights(model)
    guarded = _weight_of_layer(layers, weights)
    if not guarded:
        raise ValueError(
            "No adapter updates a pruned weight, so that merging fills no zeros, and none would be kept of adapters that are "
            "added later: call keep_lora_sparse after adding those to pruned projections, or leave it out."
        )
    if exact:
        for layer in guarded:
            peft.check_understood(layer)
        _check_own_weights(layers)
    guard_merging(model, weights, exact)
    return model


def check_peft() -> None:
    """Raise `ImportError` if peft is not installed."""
    if importlib.util.find_spec("peft") is None:
        raise ImportError("Adapters need peft: pip install optimum-neuronal[peft]")


def guard_merging(model: nn.Module, weights: list[SparseWeight], exact: bool | None = None) -> bool:
    """Make the adapter layers around sparse weights keep the zeros at merging; do nothing without adapters.

    Args:
        model (`nn.Module`): with or without adapters.
        weights (`list[SparseWeight]`): of the model.
        exact (`bool`, *optional*): see [`keep_lora_sparse`]; None: False, but a guarded layer stays as it is.

    Returns:
        `bool`: True if a layer changed.
    """
    found = _weight_of_layer(list(peft.all_adapter_layers(model)), weights)
    guard_added = _GuardAdded(unwrap(model), weights)
    return any([peft.guard_layer(layer, weight, guard_added, exact) for layer, weight in found.items()])


@dataclass(eq=False)
class _GuardAdded:
    """Guards, before a guarded layer merges, the adapter layers that were added to its model since, and warns of them.

    Args:
        model (`nn.Module`): that holds the layers.
        weights (`list[SparseWeight]`): all of its pruned weights.
    """

    model: nn.Module
    weights: list[SparseWeight]

    def __call__(self) -> None:
        added = _weight_of_layer(peft.unguarded_layers(self.model), self.weights)
        for layer, weight in added.items():
            peft.guard_layer(layer, weight, self, exact=False)
            if layer.merged:  # before any guarded layer was
                weight.apply()
        if added:
            names = [weight.name for weight in added.values()]
            logger.warning(
                f"Adapters were added to {names[0]}{' and others' if names[1:] else ''} after keep_lora_sparse. Merging leaves "
                "out their updates of pruned weights, so that the merged model computes something else than the trained "
                "one. Call keep_lora_sparse(model) again after an adapter was added, before it is trained."
            )


def _weight_of_layer(layers: list[Any], weights: list[SparseWeight]) -> dict[Any, SparseWeight]:
    """Return adapter layer -> the sparse weight that it updates."""
    by_owner = {(weight.module, weight.parameter): weight for weight in weights}
    updated = {layer: by_owner.get(peft.updated_parameter(layer)) for layer in layers}
    return {layer: weight for layer, weight in updated.items() if weight is not None}


def _check_own_weights(layers: list[Any]) -> None:
    """Raise `ValueError` if two adapter layers update the same weight: merging adds both updates to it."""
    modules: dict[int, nn.Module] = {}
    for layer in layers:
        base, parameter = peft.updated_parameter(layer)
        if modules.setdefault(id(getattr(base, parameter)), base) is not base:
            raise ValueError(
                "Several layers share their weights (layer_replication), so that merging adds the updates of all to each: "
                "replicate the layers of the model itself; or call keep_lora_sparse(model, exact=False), and do not merge."
            )
