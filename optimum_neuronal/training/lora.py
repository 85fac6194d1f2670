"""LoRA on a sparse model: merging keeps every zero.

An update `scaling * B @ A` is dense, so merging it fills the zeros. Here merging leaves out the update of pruned weights.
[`keep_lora_sparse`] leaves it out in the forward too, so the merged model computes what the trained model did.
"""

from typing import Any

from torch import nn

from ..common.notes import get_logger
from ..compat import peft
from .sparse_weights import SparseWeight, find_sparse_weights, unwrap


logger = get_logger(__name__)


def keep_lora_sparse(model: nn.Module, exact: bool = True) -> nn.Module:
    """Make `merge_and_unload` and `merge_adapter` of a sparse model with LoRA keep every zero.

    Call it on the result of `get_peft_model` or `PeftModel.from_pretrained`, before training or merging. It is not saved:
    call it again after loading, and after adding an adapter.

    Args:
        model (`PeftModel`): or a transformers model with adapters (`add_adapter`); changed in place.
        exact (`bool`):
            True: the forward leaves out the update of pruned weights too, so merging does not change what the model
            computes, beyond rounding. Each adapted projection makes its full update in every forward, and keeps it until
            the backward. False: only merging leaves it out, so the merged model differs from the trained one.

    Returns:
        The same model.

    Raises:
        `ImportError`: peft is not installed.
        `TypeError`: not a model.
        `ValueError`: the model has no adapters on pruned weights, merged adapters, or no zeros; or an adapter other than
            LoRA or rsLoRA on a linear layer. [`keep_sparsity`] says what to do with others.
    """
    peft.check_peft()
    unwrap(model)  # raises before adapters are looked for
    layers = list(peft.all_adapter_layers(model))
    if not layers:
        raise ValueError("The model has no adapters: call keep_lora_sparse on the result of peft.get_peft_model.")
    if any(layer.merged for layer in layers):
        raise ValueError("The adapters are merged already: call unmerge_adapter() first.")
    adapted = _adapted_weights(model, find_sparse_weights(model))
    if not adapted:
        raise ValueError("No adapter updates a pruned weight: leave out keep_lora_sparse.")
    from ..compat.peft_layers import make_sparse

    for layer, weight in adapted.items():
        if not make_sparse(layer, weight, exact):
            raise ValueError(
                f"keep_lora_sparse supports LoRA and rsLoRA of linear layers only, but {weight.name} has another adapter "
                f"({_describe(layer)}). Call keeper = keep_sparsity(model) before merging, and keeper.apply() after it."
            )
    return model


def guard_merging(model: nn.Module, weights: list[SparseWeight]) -> None:
    """Let LoRA keep zeros in merges, unless it does already. Warn of what merging changes, and of other adapters."""
    adapted = _adapted_weights(model, weights)
    if not adapted:
        return
    from ..compat.peft_layers import is_sparse, make_sparse

    found = [make_sparse(layer, weight, exact=False) for layer, weight in adapted.items() if not is_sparse(layer)]
    if any(found):
        logger.warning(
            "Merging will leave out the adapters' updates of pruned weights, so the merged model will differ from the "
            "trained one. Call keep_lora_sparse(model) before training to train without them."
        )
    if not all(found):
        logger.warning("Merging these adapters changes pruned weights: call the keeper's apply() after merging.")


def _adapted_weights(model: nn.Module, weights: list[SparseWeight]) -> dict[Any, SparseWeight]:
    """Return adapter layer -> the sparse weight that it updates."""
    by_owner = {(weight.module, weight.parameter): weight for weight in weights}
    updated = {layer: by_owner.get(peft.updated_parameter(layer)) for layer in peft.all_adapter_layers(model)}
    return {layer: weight for layer, weight in updated.items() if weight is not None}


def _describe(layer: Any) -> str:
    """Return the name of an adapter layer's class, or those of its LoRA variants."""
    variants = {type(variant).__name__ for variant in getattr(layer, "lora_variant", {}).values()}
    return ", ".join(sorted(variants)) or f"{type(layer).__module__}.{type(layer).__name__}"
