"""Refuses models and weights that cannot be pruned, before any long work."""

import re
from collections.abc import Mapping

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..compat import hf_private
from ..compat.accelerate import is_offloaded
from ..saliency.masks import ColumnPattern
from .packed_modules import PackedModule
from .projections import Projection


def check_model(model: PreTrainedModel) -> None:
    """Raise `TypeError` or `ValueError` for a model that cannot be pruned.

    These are models that are not of transformers, are quantized, carry adapters, compute with packed weights or are
    compiled in part, and the models of [`check_kind`].
    """
    if hasattr(model, "peft_config"):
        raise ValueError("The model carries PEFT adapters: merge them first with model.merge_and_unload().")
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"Expected a transformers PreTrainedModel, got {type(model).__name__}.")
    check_dense(model, "to prune it")
    if hf_private.is_quantized(model):
        raise ValueError("The model is quantized: prune the original model, then quantize the sparse one.")
    check_kind(type(model), model.config)
    for name, module in model.named_modules():
        if name and module._compiled_call_impl is not None:  # then hooks do not see the inputs of the modules in it
            raise ValueError(f"{name} is compiled in place (compile()): prune the model first, then compile it.")
    try:
        model.get_input_embeddings()
    except NotImplementedError as error:
        raise ValueError(
            f"{type(model).__name__} has no table of token embeddings, so the part that reads text is not known: load that "
            "part as a model, and prune it."
        ) from error


def check_dense(model: nn.Module, purpose: str) -> None:
    """Raise `ValueError` if a model holds packed modules, which only compute; `purpose` is the work: `"to prune it"`."""
    count = sum(isinstance(module, PackedModule) for module in model.modules())
    if count:
        raise ValueError(
            f"The model holds {count} packed weights, which only compute: call optimum_neuronal.densify(model) first "
            f"{purpose}."
        )


def check_kind(model_class: type[PreTrainedModel] | None, config: PreTrainedConfig) -> None:
    """Raise `ValueError` unless the model is a decoder or encoder of text, or a model of several modalities with one.

    Args:
        model_class (`type`, *optional*): None passes: the class is not known before code of the model's own has run.
        config (`PreTrainedConfig`): of the model.
    """
    name = config.model_type if model_class is None else model_class.__name__
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"{name} is of an encoder-decoder family ({config.model_type}): pruned are decoders, and encoders such as BERT."
        )
    read = getattr(model_class, "main_input_name", "input_ids")
    if read != "input_ids" and config.get_text_config(decoder=True) is config:
        raise ValueError(f"{name} reads {read!r}, not text: only models that read token ids can be pruned.")


def check_weights(projections: Mapping[str, Projection]) -> None:
    """Raise `ValueError` unless every projection has its own finite floating-point weights, in memory, that can be changed.

    Errors that would come while weights change are found here, so that no model is left half pruned.
    """
    owners: dict[int, str] = {}
    for name, projection in projections.items():
        weight = projection.owner
        if hasattr(weight, "device_mesh"):
            raise ValueError(f"The weights of {name} are spread over processes: load the model without tp_plan.")
        if is_offloaded(projection.module):
            continue  # read block by block when they are needed
        if weight.is_meta:
            raise ValueError(
                f"The weights of {name} are on the meta device: load them with from_pretrained, which can leave them on "
                "disk (device_map, offload_folder)."
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
    """Raise `ValueError` for a weight that cannot be changed in place; `name` is the projection's."""
    if weight.is_inference() or any(size > 1 and not step for size, step in zip(weight.shape, weight.stride())):
        raise ValueError(
            f"The weights of {name} cannot be changed in place (made under torch.inference_mode(), or expanded): load "
            "the model outside of it, or give it weights of their own."
        )


def check_pattern(projections: Mapping[str, Projection], pattern: ColumnPattern | None) -> None:
    """Raise `ValueError` unless the groups of an N:M pattern fit into the rows of every projection."""
    for name, projection in projections.items():
        features = projection.shape[1]
        if pattern is not None and features % pattern.group:
            raise ValueError(
                f"{name} has {features} input features, not a multiple of {pattern.group}: the pattern {pattern} does "
                f"not fit. Leave it out with ignore=[{re.escape(name)!r}]."
            )
