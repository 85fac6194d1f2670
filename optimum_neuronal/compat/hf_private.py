"""Private names of transformers, accelerate and torch: a release that changes one breaks only this module."""

import copy
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, modeling_utils
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.quantizers import HfQuantizer


# Keys of config.json that describe the file, not the model.
FILE_KEYS = ("_name_or_path", "architectures", "dtype", "transformers_version")
WEIGHTS_KEY = "transformers_weights"  # key of a config with the name of the file of weights


def model_class_for(auto_class: str, config: PreTrainedConfig) -> type | None:
    """Return the model class that an Auto class, by its name, chooses for a config, or None."""
    classes = getattr(transformers, auto_class)._model_mapping.get(type(config), None)
    return classes[0] if isinstance(classes, (list, tuple)) else classes


def choose_attention(config: PreTrainedConfig, name: Any) -> PreTrainedConfig:
    """Let a config and its parts name an attention function, or none, so that transformers chooses one."""
    config._attn_implementation = name
    return config


# Tensors.


def content_version(tensor: torch.Tensor) -> int:
    """Return a number that changes when a tensor is changed in place."""
    return tensor._version


# Loading.


class PlainQuantizer(HfQuantizer):
    """A quantizer of models that can be saved and trained."""

    is_trainable = True

    def is_serializable(self) -> bool:
        return True


def as_loaded(
    model: PreTrainedModel, tensors: Mapping[str, torch.Tensor], weights: Mapping[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what `from_pretrained` makes of the tensors in files, by the names of a model's `weights`.

    A tensor that it ignores keeps its name in the files.
    """
    conversions = get_model_conversion_mapping(model)
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
    patterns = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    converted: dict[str, WeightConverter] = {}
    for name in sorted(tensors, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, weights)
        if target in weights and pattern is not None:
            converter = converted.setdefault(target, copy.deepcopy(patterns[pattern]))
            converter.add_tensor(target, name, pattern, tensors[name])
        else:
            yield target if target in weights else name, tensors[name]
    for target, converter in converted.items():
        for name, made in converter.convert(target, model=model, config=model.config).items():
            yield name, made[0] if isinstance(made, list) else made


def match_names(model: PreTrainedModel, tensors: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the names of a model's weights that `from_pretrained` would not find in files, and of tensors that it ignores.

    Only shape and dtype of the tensors in files are read.
    """
    on_meta = {name: torch.empty(tuple(t.shape), dtype=t.dtype, device="meta") for name, t in tensors.items()}
    expected = model.state_dict()
    known = expected | dict(model.named_buffers())
    loaded = dict(as_loaded(model, on_meta, known))
    misshapen = {name for name in expected.keys() & loaded if loaded[name].shape != expected[name].shape}
    lacking = sorted(misshapen | missing_names(model, set(loaded)))
    return lacking, [name for name in tensors if name in loaded and name not in known]


def ignored_names(model: PreTrainedModel, names: Iterable[str]) -> list[str]:
    """Return the names of weights in files that the model's family ignores."""
    pattern = re.compile("|".join(model._keys_to_ignore_on_load_unexpected or ["(?!)"]))
    return [name for name in names if pattern.search(name)]


def missing_names(model: PreTrainedModel, held: set[str]) -> set[str]:
    """Return the names of a model's weights that a checkpoint with the names `held` lacks, as `from_pretrained` does."""
    tied = model.all_tied_weights_keys  # name -> the name of the weight that it shares
    shared = {source for name, source in tied.items() if held & {name, source}}
    held = held | shared | {name for name, source in tied.items() if source in shared}
    optional = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_missing or ()]
    return {name for name in model.state_dict().keys() - held if not any(pattern.search(name) for pattern in optional)}


def forget_quantization(model: PreTrainedModel) -> None:
    """Remove the attributes that `from_pretrained` sets for a quantizer, so that the model is a plain one."""
    for attribute in ("quantization_config", WEIGHTS_KEY):
        model.config.__dict__.pop(attribute, None)
    for attribute in ("hf_quantizer", "is_quantized", "quantization_method"):
        model.__dict__.pop(attribute, None)


def forget_conversions(model: PreTrainedModel) -> None:
    """Let `save_pretrained` write the names of the family's checkpoints, although the model was loaded by other names."""
    model.__dict__.pop("_weight_conversions", None)


def is_quantized(model: PreTrainedModel) -> bool:
    """Return True if another tool has quantized the model, at load or before."""
    return getattr(model.config, "quantization_config", None) is not None or getattr(model, "is_quantized", False)


# Training.


def on_one_gpu(arguments: "transformers.TrainingArguments") -> "transformers.TrainingArguments":
    """Let `Trainer` use one GPU in this process: it would give each visible one a whole batch (`DataParallel`)."""
    arguments._n_gpu = min(arguments.n_gpu, 1)
    return arguments


def load_weights(trainer: "transformers.Trainer", checkpoint: Path) -> None:
    """Load the weights of one of a trainer's checkpoints, or their adapters, into its model."""
    trainer._load_from_checkpoint(str(checkpoint))


# Saving.


def as_stored(model: PreTrainedModel, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors of a model, on any device, as its family's checkpoints hold them: experts one by one, gate and up apart.

    From now on `save_pretrained` writes these names too. It would undo what the model was loaded with, such as dequantizing.
    """
    forget_conversions(model)
    return revert_weight_conversion(model, dict(tensors))


def untied(model: PreTrainedModel, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of a model's state dict to save: tied ones once, without the ignored ones."""
    ignored = model._keys_to_ignore_on_save or ()
    kept = {name: tensor for name, tensor in state.items() if name not in ignored}
    return modeling_utils.remove_tied_weights_from_state_dict(kept, model)


def tied_names(model: PreTrainedModel) -> set[str]:
    """Return the names of weights that a model's config ties. transformers looks for them as dense weights at load."""
    pairs = model.get_expanded_tied_weights_keys(all_submodels=True)
    return {name for pair in pairs.items() for name in pair}


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the model inside the wrapper of torch.compile, or any other model itself."""
    return getattr(model, "_orig_mod", model)


def has_compiled_parts(model: nn.Module) -> bool:
    """Return True if torch.compile has compiled a module inside a model, in place or in a wrapper."""
    inside = list(model.modules())[1:]
    return any(uncompiled(module) is not module or module._compiled_call_impl is not None for module in inside)


def unsplit_modules(model: PreTrainedModel) -> set[str]:
    """Return the class names of modules that must not be split over devices: the decoder blocks in most families."""
    return set(getattr(model, "_no_split_modules", None) or ())


# MoE layers: the convention of all families since 5.13 (`use_experts_implementation`). A module holds weights of shape
# (experts, ., .), named `gate_up_proj` or `up_proj`, and `down_proj`. `is_transposed` is True if an expert's weight has the
# layout (in, out), and `is_concatenated` False if rows of gate and up alternate.


def expert_bias(experts: nn.Module, parameter: str, expert: int) -> torch.Tensor | None:
    bias = getattr(experts, f"{parameter}_bias", None)
    return None if bias is None else bias[expert]


def activate(experts: nn.Module, inner: torch.Tensor, gated: bool) -> torch.Tensor:
    """Return the input of an expert's last weight from its first weight's output, shape (tokens, rows of the weight)."""
    if not gated:
        return experts.act_fn(inner)
    if hasattr(experts, "_apply_gate"):  # families with an unusual gate override it
        return experts._apply_gate(inner)
    gate, up = inner.chunk(2, dim=-1)
    return experts.act_fn(gate) * up


def finish(experts: nn.Module, output: torch.Tensor) -> torch.Tensor:
    """Return an expert's output from its last weight's output: some families apply a norm."""
    return experts.post_expert_norm(output) if hasattr(experts, "post_expert_norm") else output


# The registry of functions that compute the experts: a name in a module's config, which is the model's, chooses one.


def chooses_experts_function(module: nn.Module) -> bool:
    """Return True for experts, all of them in this process, whose forward is looked up in the registry at every call."""
    looks_up = hasattr(type(module).forward, "__wrapped__") and hasattr(module, "is_transposed")
    return looks_up and not getattr(module, "_is_expert_parallel", False)


def own_experts_forward(experts: nn.Module) -> Callable:
    """Return the forward that the family itself has for its experts."""
    return type(experts).forward.__wrapped__


def choose_experts_function(experts: nn.Module, name: str) -> PreTrainedConfig | None:
    """Choose a function for one module, in a copy of its config. Return the previous config, None if it named the function."""
    before = experts.config
    if before._experts_implementation == name:
        return None
    experts.config = copy.copy(before)
    experts.config._experts_implementation_internal = name
    return before


def names_in_float32(model: PreTrainedModel, dtype: torch.dtype) -> re.Pattern:
    """Return a pattern of the names of parameters that a model of this dtype keeps in float32."""
    return re.compile("|".join(name.replace("*", ".*") for name in model._get_dtype_plan(dtype)) or "(?!)")


# Offloading: weights wait in CPU memory or on disk, and a hook of accelerate reads them at every forward.


def is_offloaded(module: nn.Module) -> bool:
    """Return True if a hook of accelerate holds the module's own weights."""
    return getattr(getattr(module, "_hf_hook", None), "weights_map", None) is not None


def offload_hook(module: nn.Module) -> Any:
    """Return the hook (an `AlignDevicesHook`) of an offloaded module, with `weights_map`: parameter name -> tensor."""
    return module._hf_hook


def execution_device(module: nn.Module) -> torch.device:
    """Return the device on which a module with weights computes, wherever its weights are."""
    device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
    if device is not None:
        return torch.device(device)
    return next(itertools.chain(module.parameters(), module.buffers())).device  # packed weights are buffers
