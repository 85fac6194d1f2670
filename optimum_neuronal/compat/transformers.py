"""All that is used of transformers beyond what it documents, so that a release that changes it breaks this module alone.

Every room may import this one, which imports nothing of the package (setup.cfg). Where releases differ, the docstrings
name them; the lowest is the one that setup.cfg admits.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, modeling_utils
from transformers.core_model_loading import revert_weight_conversion
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.quantizers import HfQuantizer
from transformers.utils.hub import cached_file, convert_file_size_to_int


# In config.json: where a model came from, not what it is.
OF_THE_FILE = ("_name_or_path", "architectures", "dtype", "transformers_version")
SAVES_OFFLOADED_EXPERTS = "5.17"  # first release whose save_pretrained reads experts that are on disk
OFFLOADED = {"weights": "disk", "all else": "cpu"}  # two places: 5.13 ignores a map that names one


# Classes: which one makes a model.


def made_by(auto_class: type, config_class: type) -> type | None:
    """The class of models that an Auto class makes of configs of a class, None if it makes none."""
    found = auto_class._model_mapping.get(config_class, None)
    return found[0] if isinstance(found, (list, tuple)) else found


def from_config(model_class: type[PreTrainedModel], config: PreTrainedConfig, **kwargs) -> PreTrainedModel:
    """What an Auto class does in its `from_config`, for a class that none of them makes."""
    return model_class._from_config(config, **kwargs)


# Files of the checkpoint that a model was loaded from.


def find_file(model: PreTrainedModel, name: str) -> Path | None:
    """Where a file lies, downloaded from the Hub if need be, of the commit that the model is of; None if there is none.

    Raises:
        `OSError`: the checkpoint cannot be reached.
    """
    commit = getattr(model.config, "_commit_hash", None)
    path = cached_file(model.config.name_or_path, name, revision=commit, _raise_exceptions_for_missing_entries=False)
    return None if path is None else Path(path)


# Loading: what a quantizer may do to it.


class EarlyQuantizer(HfQuantizer):
    """A quantizer that sees the model's config before anything else happens: [`~EarlyQuantizer.see_config`].

    Of the hooks that get the config, 5.13 calls `update_tp_plan` and `update_ep_plan`, 5.18 to 5.20 these and then
    `update_attn_implementation`, 5.23 the last alone.
    """

    def see_config(self, config: PreTrainedConfig) -> None:
        """May change or refuse it; is called once or twice."""
        raise NotImplementedError

    def update_tp_plan(self, config: PreTrainedConfig) -> PreTrainedConfig:
        self.see_config(config)
        return config

    def update_ep_plan(self, config: PreTrainedConfig) -> PreTrainedConfig:
        return config

    def update_attn_implementation(self, config: PreTrainedConfig) -> PreTrainedConfig:
        self.see_config(config)
        return config


WEIGHTS_KEY = "transformers_weights"  # of a config: where transformers looks for the name of the file with the weights


def look_for_weights(config: PreTrainedConfig, name: str) -> None:
    """Has `from_pretrained`, which has read the config and no weights, look for this file instead of model.safetensors.

    The attribute is read after the quantizer was made, and it stays on the config.
    """
    setattr(config, WEIGHTS_KEY, name)


def forget_quantization(model: PreTrainedModel) -> None:
    """Takes off a model what `from_pretrained` put there for a quantizer, so that it is a plain one."""
    for attribute in ("quantization_config", WEIGHTS_KEY):
        model.config.__dict__.pop(attribute, None)
    model.__dict__.pop("hf_quantizer", None)


def is_quantized(model: PreTrainedModel) -> bool:
    """Whether another tool has quantized the model, at load or before."""
    return getattr(model.config, "quantization_config", None) is not None or getattr(model, "is_quantized", False)


def get_file_opener() -> Callable:
    """What `from_pretrained` opens safetensors files with, memory-mapped: safetensors' `safe_open`, by a global name."""
    return modeling_utils.safe_open


def set_file_opener(opener: Callable) -> None:
    """Has `from_pretrained` open safetensors files with another callable, in all threads."""
    modeling_utils.safe_open = opener


def was_read(tensor: torch.Tensor) -> bool:
    """Whether a tensor that `from_pretrained` sets comes from a file; others it initialises afterwards."""
    return getattr(tensor, "_is_hf_initialized", False)


def as_read(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A tensor that is set in the place of another, for `from_pretrained` as much read from a file as that one."""
    tensor._is_hf_initialized = was_read(like)
    return tensor


# Saving.


def exportable_state() -> type:
    """The base of callbacks whose state checkpoints keep. Its module takes long to import: loading does without."""
    from transformers.trainer_callback import ExportableState

    return ExportableState


def as_stored(model: PreTrainedModel, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of a model, on any device, as its checkpoints hold them: experts one by one, gate and up apart."""
    return revert_weight_conversion(model, dict(tensors))


def stored_tensors(
    model: PreTrainedModel,
    state: Mapping[str, torch.Tensor] | None = None,
    untied: Mapping[str, torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """What `save_pretrained` writes, by the names in the files: of tied weights one, without those it leaves out.

    Args:
        model (`PreTrainedModel`): that is saved.
        state (`Mapping[str, Tensor]`, *optional*): its parameters and persistent buffers by name. None: its `state_dict`.
        untied (`Mapping[str, Tensor]`, *optional*):
            More of them, which are known not to be tied, and need not have a storage.
    """
    state = model.state_dict() if state is None else state
    kept = {name: tensor for name, tensor in state.items() if name not in (model._keys_to_ignore_on_save or ())}
    return as_stored(model, {**modeling_utils.remove_tied_weights_from_state_dict(kept, model), **(untied or {})})


@contextmanager
def known_as_offloaded(model: PreTrainedModel) -> Iterator[None]:
    """While the context lasts, `save_pretrained` reads the weights that are offloaded, whoever has offloaded them.

    It goes by the device map that `from_pretrained` leaves on a model; accelerate's `cpu_offload` leaves none. And it
    warns of the memory that a shard takes, so the caller should keep shards small.
    """
    before = model.__dict__.get("hf_device_map")
    model.hf_device_map = dict(OFFLOADED)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Attempting to save a model with offloaded modules")
            yield
    finally:
        if before is None:
            del model.hf_device_map
        else:
            model.hf_device_map = before


def release() -> str:
    """Which transformers this is: `"5.23.0"`."""
    return transformers.__version__


def saves_offloaded_experts() -> bool:
    """Whether this release's `save_pretrained` can write experts whose weights are offloaded."""
    return Version(release()) >= Version(SAVES_OFFLOADED_EXPERTS)


def bytes_of(size: int | str) -> int:
    """What `save_pretrained` takes for `max_shard_size`, bytes or `"500MB"`, in bytes. Raises `ValueError` for all else."""
    message = f"max_shard_size is {size!r}: expected bytes, or text such as '500MB'"
    if isinstance(size, bool) or not isinstance(size, (int, str)):
        raise ValueError(f"{message}.")
    try:
        count = convert_file_size_to_int(size)
    except ValueError as error:
        raise ValueError(f"{message}: {error}") from error
    if count < 1:
        raise ValueError(f"{message}.")
    return count


# What a model tells of itself.


def has_device_map(model: PreTrainedModel) -> bool:
    """Whether `from_pretrained` has placed the model's parts, some of which may be offloaded."""
    return hasattr(model, "hf_device_map")


def has_own_adapters(model: PreTrainedModel) -> bool:
    """Whether adapters were added with the model's own `add_adapter`: `save_pretrained` then saves these alone."""
    return getattr(model, "_hf_peft_config_loaded", False)


def unsplit_modules(model: PreTrainedModel) -> set[str]:
    """Names of the classes that must not be spread over devices: of decoder blocks, if the family names any."""
    return set(getattr(model, "_no_split_modules", None) or ())


def tied_names(model: PreTrainedModel) -> set[str]:
    """Names of all parameters of a model, loaded or not, that are tied to others."""
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    return {*tied.keys(), *tied.values()}


# Mixtures of experts: the convention of all families since 5.13 (`use_experts_implementation`). A module holds weights of
# shape (experts, ., .), which are called `gate_up_proj` or `up_proj`, and `down_proj`.


def is_transposed(experts: nn.Module, default: bool) -> bool:
    """Whether an expert's weight is kept as (in, out); the default is for modules that do not tell."""
    return getattr(experts, "is_transposed", default)


def gates_in_turns(experts: nn.Module) -> bool:
    """Whether the rows of `gate_up_proj` are gate and up in turns, and not all gates, then all ups."""
    return not getattr(experts, "is_concatenated", True)


def expert_bias(experts: nn.Module, parameter: str, expert: int) -> torch.Tensor | None:
    """The bias that goes with an expert's part of a weight, None if there is none."""
    bias = getattr(experts, f"{parameter}_bias", None)
    return None if bias is None else bias[expert]


def activate(experts: nn.Module, inner: torch.Tensor, gated: bool) -> torch.Tensor:
    """What an expert computes between its weights, of shape (tokens, rows of the first weight).

    Families with a gate of their own kind override `_apply_gate`; a module without it has the usual one.
    """
    if not gated:
        return experts.act_fn(inner)
    if hasattr(experts, "_apply_gate"):
        return experts._apply_gate(inner)
    gate, up = inner.chunk(2, dim=-1)
    return experts.act_fn(gate) * up


def finish(experts: nn.Module, output: torch.Tensor) -> torch.Tensor:
    """What an expert does with the output of its last weight: few families have a norm there."""
    norm: Any = getattr(experts, "post_expert_norm", None)
    return output if norm is None else norm(output)


# The registry of what computes a mixture: a name in the text config chooses for all mixtures of a model.


def chooses_experts_function(module: nn.Module) -> bool:
    """Whether a module is a mixture of experts whose forward is looked up in transformers' registry at every call."""
    return hasattr(type(module).forward, "__wrapped__") and hasattr(module, "is_transposed")


def register_experts_function(name: str, function: Callable) -> None:
    """Adds `function(experts, hidden, indices, weights)` to the registry."""
    ALL_EXPERTS_FUNCTIONS.register(name, function)


def experts_function(experts: nn.Module) -> str | None:
    """The name of what computes a mixture now."""
    return experts.config._experts_implementation


def set_experts_function(experts: nn.Module, name: str | None) -> None:
    """Has this mixture, and all others of its model, be computed by what is registered under a name."""
    experts.config._experts_implementation_internal = name


def own_experts_forward(experts: nn.Module) -> Callable:
    """What computes a mixture where nothing else is chosen: the family's own loop over the experts."""
    return type(experts).forward.__wrapped__.__get__(experts)


def is_spread_over_processes(experts: nn.Module) -> bool:
    """Whether every process holds some of the experts only."""
    return getattr(experts, "_is_expert_parallel", False)
