"""LoRA on a sparse model, where merging keeps every zero, and on a packed model, whose weights stay packed.

An update `scaling * B @ A` is dense, so merging it fills the zeros. Here merging leaves out the update of pruned weights.
[`keep_lora_sparse`] leaves it out in the forward too, so the merged model computes what the trained model did.
"""

from typing import Any

from torch import nn

from ..common.notes import get_logger
from ..compat import peft
from ..packed.packed_module import PackedLinear, allow_gradients, is_linear, packed_modules
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
        `TypeError`: not a model.
        `ValueError`: the model has no adapters on pruned weights, merged adapters, or no zeros; or an adapter other than
            LoRA or rsLoRA on a linear layer. [`keep_sparsity`] says what to do with others.
    """
    if any(layer.merged for layer in peft.all_adapter_layers(unwrap(model))):
        raise ValueError("The adapters are merged already: call unmerge_adapter() first.")
    adapted = _adapted_weights(model, find_sparse_weights(model))
    if not adapted:
        raise ValueError(
            "No adapter updates a pruned weight: call keep_lora_sparse on the result of peft.get_peft_model, or leave it out."
        )
    from ..compat.peft_layers import make_sparse

    for layer, weight in adapted.items():
        if not make_sparse(layer, weight, exact):
            raise ValueError(
                f"keep_lora_sparse supports LoRA and rsLoRA of linear layers only, not the adapter of {weight.name}: call "
                "keeper = keep_sparsity(model) before merging, and keeper.apply() after it."
            )
    return model


def lora_for_packed(model: nn.Module, config: Any) -> Any:
    """Return a `LoraConfig` that lets PEFT put LoRA around packed linear layers.

    ```python
    model = get_peft_model(model, lora_for_packed(model, LoraConfig(target_modules="all-linear")))
    model = PeftModel.from_pretrained(model, path, config=lora_for_packed(model, path))
    ```

    The result is an ordinary adapter, which also fits the dense model. The backward needs memory for a few unpacked rows. To
    merge adapters, call [`densify`] first, see [`keep_lora_sparse`].

    Args:
        model (`PreTrainedModel`): with packed weights. With dense weights, a copy of the config is returned.
        config (`LoraConfig`): or the path or Hub id of a saved adapter.

    Raises:
        `TypeError`: not a model, or another config.
        `ValueError`: the config trains biases or packed modules, or its `init_lora_weights` changes the adapted weights.
    """
    from ..compat.peft_layers import packed_lora_config

    model, config = unwrap(model), packed_lora_config(config, PackedLinear)
    if next(packed_modules(model), None) is None:
        return config
    if config.bias != "none":
        raise ValueError(
            f"bias={config.bias!r}: biases of packed layers are not trained. Leave it 'none', or call "
            "optimum_neuronal.densify(model) first."
        )
    kept = tuple(f".{name}" for name in config.modules_to_save or ())
    if wrong := next((name for name, _ in packed_modules(model) if f".{name}".endswith(kept)), None):
        raise ValueError(
            f"modules_to_save names {wrong}, which is packed and cannot be trained: leave it out, or call "
            "optimum_neuronal.densify(model) first."
        )
    if isinstance(config.target_modules, str) and config.target_modules.lower() == "all-linear":
        head = getattr(model, "get_output_embeddings", lambda: None)()
        with peft.without_adapters(model):
            modules = [(name, module) for name, module in model.named_modules() if module is not head]
        config.target_modules = {
            name for name, module in modules if isinstance(module, PackedLinear) or is_linear(type(module))
        }
    allow_gradients(model)
    return config


def guard_merging(model: nn.Module, weights: list[SparseWeight]) -> None:
    """Make LoRA keep zeros in merges, unless it does already. Warn about what merging changes, and about other adapters."""
    adapted = _adapted_weights(model, weights)
    if not adapted:
        return
    from ..compat.peft_layers import is_sparse, make_sparse

    guarded = [make_sparse(layer, weight, exact=None) for layer, weight in adapted.items() if not is_sparse(layer)]
    if any(guarded):
        logger.warning(
            "Merging will leave out the adapters' updates of pruned weights, so the merged model will differ from the "
            "trained one. Call keep_lora_sparse(model) before training to train without them."
        )
    if not all(guarded):
        logger.warning("Merging these adapters changes pruned weights: call the keeper's apply() after merging.")


def _adapted_weights(model: nn.Module, weights: list[SparseWeight]) -> dict[Any, SparseWeight]:
    """Return adapter layer -> the sparse weight that it updates."""
    by_owner = {(weight.module, weight.parameter): weight for weight in weights}
    updated = {layer: by_owner.get(peft.updated_parameter(layer)) for layer in peft.all_adapter_layers(model)}
    return {layer: weight for layer, weight in updated.items() if weight is not None}
