"""Checks that a model and its weights can be pruned, before any long work."""

import re
from collections.abc import Mapping

import torch
from torch import nn
from transformers import PreTrainedModel

from ..compat import hf_private
from ..compat.accelerate import is_offloaded
from ..model.load_model import check_kind
from ..model.projections import Projection
from ..packed.packed_module import PackedModule
from ..saliency.masks import ColumnPattern


def check_model(model: PreTrainedModel) -> None:
    """Raise `TypeError` or `ValueError` for a model that cannot be pruned, whatever its weights are."""
    if hasattr(model, "peft_config"):
        raise ValueError("The model has PEFT adapters: merge them first with model.merge_and_unload().")
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"Expected a transformers PreTrainedModel, got {type(model).__name__}.")
    check_dense(model, "to prune it")
    if hf_private.is_quantized(model):
        raise ValueError("The model is quantized: prune the original model, then quantize the sparse one.")
    check_kind(type(model), model.config)
    for name, module in model.named_modules():
        if name and module._compiled_call_impl is not None:  # hooks do not see the inputs of modules in it
            raise ValueError(f"{name} is compiled in place: prune the model first, then compile it.")
    try:
        model.get_input_embeddings()
    except NotImplementedError as error:
        raise ValueError(
            f"{type(model).__name__} has no token embeddings: load the part that reads text as a model, and prune that."
        ) from error


def check_dense(model: nn.Module, purpose: str) -> None:
    """Raise `ValueError` if a model holds packed modules. `purpose` is the work, such as `"to prune it"`."""
    count = sum(isinstance(module, PackedModule) for module in model.modules())
    if count:
        raise ValueError(f"The model holds {count} packed weights: call optimum_neuronal.densify(model) first {purpose}.")


def check_weights(projections: Mapping[str, Projection]) -> None:
    """Raise `ValueError` unless every projection has its own finite floating-point weights that can be changed."""
    owners: dict[int, str] = {}
    for name, projection in projections.items():
        weight = projection.owner
        if hasattr(weight, "device_mesh"):
            raise ValueError(f"The weights of {name} are spread over processes: load the model without tp_plan.")
        if is_offloaded(projection.module):
            continue
        if weight.is_meta:
            raise ValueError(
                f"The weights of {name} are on the meta device: load them with from_pretrained. device_map and "
                "offload_folder can leave them on disk."
            )
        if not weight.is_floating_point():
            raise ValueError(f"The weights of {name} have dtype {weight.dtype}: load the model without quantization.")
        check_changeable(name, weight)
        other = owners.setdefault(projection.weight.data_ptr(), name)
        if other != name:
            raise ValueError(f"{name} shares its weights with {other}: tied projections cannot be pruned.")
        if not bool(torch.isfinite(projection.weight).all()):
            raise ValueError(f"The weights of {name} contain NaN or infinity: the checkpoint is damaged.")


def check_changeable(name: str, weight: torch.Tensor) -> None:
    """Raise `ValueError` for a weight that cannot be changed in place."""
    if weight.is_inference() or any(size > 1 and not step for size, step in zip(weight.shape, weight.stride())):
        raise ValueError(
            f"The weights of {name} cannot be changed in place: they are expanded, or were made under "
            "torch.inference_mode(). Load the model outside of it."
        )


def check_pattern(projections: Mapping[str, Projection], pattern: ColumnPattern | None) -> None:
    """Raise `ValueError` unless the groups of an N:M pattern fit into the rows of every projection."""
    for name, projection in projections.items():
        features = projection.shape[1]
        if pattern is not None and features % pattern.group:
            raise ValueError(
                f"{name} has {features} input features, not a multiple of {pattern.group}, so the pattern {pattern} does "
                f"not fit. Leave it out with ignore=[{re.escape(name)!r}]."
            )
