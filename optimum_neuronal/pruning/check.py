"""The one check of model and config together, before any long work."""

import re
from collections.abc import Mapping

import torch
from torch import nn
from transformers import PreTrainedModel

from ..checkpoint.sparsity_config import read_sparsity_config
from ..common.validation import check_count
from ..compat import hf_private
from ..compat.accelerate import is_offloaded
from ..config.neuronal_config import NeuronALConfig
from ..data.calibration import resolve_seq_length
from ..model.find_blocks import find_decoder
from ..model.load_model import check_kind
from ..model.projections import Projection
from ..model.weight_names import token_weights
from ..packed.formats.packed_matrix import DTYPES
from ..packed.packed_module import PackedModule
from ..rotation.rotated_weights import find_rotated
from ..saliency.masks import ColumnPattern
from .context import PruneContext
from .packing import check_quantizable


def check(
    model: PreTrainedModel,
    config: NeuronALConfig,
    batch_size: int | None = None,
    max_hidden_bytes: int | None = None,
    loaded: bool = True,
) -> PruneContext:
    """Raise for everything that can be known to be wrong before calibration data is loaded; return the context.

    Args:
        model (`PreTrainedModel`): a dense decoder model.
        config ([`NeuronALConfig`]): how to prune.
        batch_size, max_hidden_bytes (`int`, *optional*): as for [`NeuronALPruner.prune`].
        loaded (`bool`): False if the weights are still on the meta device, so that only the structure is checked.

    Raises:
        `ValueError`, `TypeError`: the config does not fit the model; the message says what to do.
    """
    for name, value, least in (("batch_size", batch_size, 1), ("max_hidden_bytes", max_hidden_bytes, 0)):
        if value is not None:
            check_count(name, value, least)
    check_model(model)
    if read_sparsity_config(model.config) is not None:
        raise ValueError(
            f"{model.config.name_or_path or 'The model'} is already sparse: its config has a sparsity_config. Load the dense "
            "model; or, to prune further in Python, del model.config.sparsity_config first."
        )
    decoder = find_decoder(model, config.targets, config.ignore)
    context = PruneContext(
        decoder, config, config.make_methods(), batch_size=batch_size, max_hidden_bytes=max_hidden_bytes
    )
    context.methods.suited_to(decoder)
    check_pattern(decoder.projections, context.methods.pattern)
    resolve_seq_length(model.config, config.seq_length)
    if config.bits_per_weight is not None:
        check_quantizable(decoder, loaded)
    if config.embedding_bits is not None:
        _check_head(model, loaded)
    if context.methods.rotation is not None:
        find_rotated(decoder, context.methods.rotation.untie)
    if loaded:
        check_weights(decoder.projections)
        for name, parameter in model.named_parameters() if context.methods.rotation is not None else ():
            check_changeable(name, parameter)
    return context


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
        raise ValueError(
            f"The model holds {count} packed weights: call optimum_neuronal.densify(model) first {purpose}."
        )


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


def _check_head(model: PreTrainedModel, loaded: bool) -> None:
    """Raise `ValueError` if token embeddings and head cannot be rounded to 8 bits."""
    found = token_weights(model)
    if not found:
        raise ValueError(f"{type(model).__name__} has neither token embeddings nor a head: leave embedding_bits out.")
    for name, weight in found.items():
        if weight.ndim != 2 or weight.dtype not in DTYPES:
            raise ValueError(
                f"{name} has dtype {weight.dtype} and shape {list(weight.shape)}: with embedding_bits, expected a matrix of "
                f"{', '.join(map(str, DTYPES))}."
            )
    if not loaded:
        return
    modules = (model.get_input_embeddings(), model.get_output_embeddings())
    offloaded = any(module is not None and is_offloaded(module) for module in modules)
    if offloaded or any(weight.is_meta for weight in found.values()):
        raise ValueError(
            "embedding_bits needs token embeddings and head in memory, and some are offloaded: leave it out, and round them in "
            "the saved model with `optimum-cli neuronal convert DIR --format packed --embedding-bits 8`."
        )
    for name, weight in found.items():
        if hasattr(weight, "device_mesh"):
            raise ValueError(f"{name} is spread over processes: load the model without tp_plan.")
        check_changeable(name, weight)
        if not bool(torch.isfinite(weight).all()):
            raise ValueError(f"{name} cannot be rounded to 8 bits: it contains NaN or infinity.")
