"""All that is used of transformers beyond what it documents, so that a release that changes it breaks this module alone.

Every room may import this one, which imports nothing of the package (setup.cfg). Where releases differ, the docstrings
name them; the lowest is the one that setup.cfg admits.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, modeling_utils
from transformers.core_model_loading import revert_weight_conversion
from transformers.quantizers import HfQuantizer
from transformers.trainer_callback import ExportableState as ExportableState  # base of callbacks that checkpoints keep
from transformers.utils.hub import convert_file_size_to_int


OF_THE_FILE = (
    "_name_or_path",
    "architectures",
    "dtype",
    "transformers_version",
)  # in config.json: where from, not what
SAVES_OFFLOADED_EXPERTS = "5.17"  # first release whose save_pretrained reads experts that are on disk
OFFLOADED = {"weights": "disk", "all else": "cpu"}  # two places: 5.13 ignores a map that names one


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


def look_for_weights(config: PreTrainedConfig, name: str) -> None:
    """Has `from_pretrained`, which has read the config and no weights, look for this file instead of model.safetensors.

    The attribute is read after the quantizer was made, and it stays on the config.
    """
    config.transformers_weights = name


def forget_quantization(model: PreTrainedModel) -> None:
    """Takes off a model what `from_pretrained` put there for a quantizer, so that it is a plain one."""
    for attribute in ("quantization_config", "transformers_weights"):
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


# Saving.


def as_stored(model: PreTrainedModel, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of a model, on any device, as its checkpoints hold them: experts one by one, gate and up apart."""
    return revert_weight_conversion(model, dict(tensors))


def stored_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """What `save_pretrained` writes, by the names in the files: of tied weights one, without those it leaves out."""
    state = model.state_dict()
    for name in model._keys_to_ignore_on_save or ():
        state.pop(name, None)
    return as_stored(model, modeling_utils.remove_tied_weights_from_state_dict(state, model))


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
    """What `save_pretrained` takes for `max_shard_size`, bytes or `"500MB"`, in bytes. Raises `ValueError` for other text."""
    return convert_file_size_to_int(size)


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
