"""Checks model, config and weights before they are pruned, once, and before any long work."""

from collections.abc import Mapping

import torch
from transformers import PreTrainedModel

from ..common.torch_state import multiplies_bfloat16
from ..compat import hf_private
from ..config.neuronal_config import NeuronALConfig
from ..data.token_windows import resolve_seq_length
from ..model.find_blocks import check_kind, count_packed, find_decoder
from ..model.projections import Decoder, Projection, patterns_of
from ..model.sparsity import SPARSE, measure_sparsity, read_sparsity_config
from ..saliency.plan import ColumnPattern


BFLOAT16_WIDTH = 512  # hidden size from which a CPU runs a block about twice as fast with bfloat16 products


def check_prune(model: PreTrainedModel, config: NeuronALConfig, loaded: bool = True, further: bool = False) -> Decoder:
    """Return the decoder of a model. Raise if the config does not fit it, or if the model is sparse already.

    `loaded=False`: weights may be on meta. `further`: a model that this package has pruned may be pruned further.
    """
    check_prunable(model, further)
    decoder = find_decoder(model, config.targets, config.ignore)
    topup = config.methods.topup
    if topup.compares_outputs and not decoder.predicts_next_token:
        raise ValueError(
            f"The top-up {topup.name!r} compares next-token distributions, but {type(model).__name__} has no causal "
            "language-model head. Choose 'neuronal', which compares activations."
        )
    _check_pattern(decoder.projections, config.methods.pattern)
    if config.methods.needs_calibration:
        resolve_seq_length(model.config, config.seq_length)
    if loaded:
        check_weights(model, decoder.projections)
        if not further and (zeros := measure_sparsity(decoder).achieved) > SPARSE:
            raise _already_sparse(model, f"{zeros:.2%} of the weights of its projections are zero")
    return decoder


def _already_sparse(model: PreTrainedModel, why: str) -> ValueError:
    name = model.config.name_or_path or "The model"
    return ValueError(f"{name} is already sparse: {why}. Prune the dense model, or fine-tune this one.")


def check_prunable(model: PreTrainedModel, further: bool = False) -> None:
    """Raise `TypeError` or `ValueError` for a model that cannot be pruned, whatever its weights are."""
    inner = hf_private.uncompiled(model)
    if not isinstance(inner, PreTrainedModel):
        raise TypeError(f"Expected a transformers PreTrainedModel, got {type(model).__name__}.")
    if inner is not model or hf_private.has_compiled_parts(model):
        raise ValueError("The model or a part of it is compiled: load it again, prune it, and compile it afterwards.")
    if hasattr(model, "peft_config") or any(hasattr(module, "get_base_layer") for module in model.modules()):
        raise ValueError(
            "The model has PEFT layers: merge them first with merge_and_unload(), or load it again without."
        )
    if count_packed(model):
        raise _already_sparse(model, "its weights are packed")
    if hf_private.is_quantized(model):
        raise ValueError("The model is quantized: prune the original model, then quantize the sparse one.")
    check_kind(type(model), model.config)
    if not further and read_sparsity_config(model.config) is not None:
        raise _already_sparse(model, "its config has a sparsity_config")


def _check_pattern(projections: Mapping[str, Projection], pattern: ColumnPattern | None) -> None:
    if pattern is None:
        return
    if wrong := {name: p.shape[1] for name, p in projections.items() if p.shape[1] % pattern.group}:
        name, features = next(iter(wrong.items()))
        raise ValueError(
            f"{name} has {features} input features, not a multiple of {pattern.group}, so the pattern {pattern} does not fit. "
            f"Leave out all such projections with ignore={patterns_of(wrong, projections)}."
        )


def check_weights(model: PreTrainedModel, projections: Mapping[str, Projection]) -> None:
    """Raise `ValueError` unless every projection has its own finite floating-point weights."""
    if any(parameter.is_inference() for parameter in model.parameters()):
        raise ValueError("The weights were created under torch.inference_mode: load or copy the model outside of it.")
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not parameter.is_meta:
            names.setdefault(parameter.data_ptr(), []).append(name)
    alike = {name: () if p.owner.is_meta else names[p.owner.data_ptr()] for name, p in projections.items()}
    if shared := {name: members for name, members in alike.items() if len(members) > 1}:
        raise ValueError(
            f"{' and '.join(next(iter(shared.values())))} share their weights: leave out all such projections with "
            f"ignore={patterns_of(shared, projections)}."
        )
    for name, projection in projections.items():
        weight = projection.owner
        if hf_private.is_offloaded(projection.module):
            continue
        if weight.is_meta:
            raise ValueError(
                f"The weights of {name} are on the meta device: load them with from_pretrained. device_map and "
                "offload_folder can leave them on disk."
            )
        if not bool(torch.isfinite(projection.weight).all()):
            raise ValueError(f"The weights of {name} contain NaN or infinity: the checkpoint is damaged.")


def find_refit_dtype(config: NeuronALConfig, decoder: Decoder) -> str | None:
    """Return the dtype in which a refit of float32 weights multiplies; None for other weights."""
    if not config.refit_epochs:
        return config.refit_dtype
    projections = decoder.projections.values()
    weights_dtype = str(next(iter(projections)).owner.dtype).removeprefix("torch.")
    if weights_dtype != "float32":
        if config.refit_dtype not in (None, weights_dtype):
            raise ValueError(
                f"refit_dtype is {config.refit_dtype!r}, but the weights are {weights_dtype}: leave it out, or load the model in float32."
            )
        return None  # blocks compute in the weights' own dtype, without autocast
    on_cpu = all(hf_private.execution_device(p.module).type == "cpu" for p in projections)
    gains = on_cpu and decoder.config.hidden_size >= BFLOAT16_WIDTH and multiplies_bfloat16(torch.device("cpu"))
    return config.refit_dtype or ("bfloat16" if gains else "float32")
