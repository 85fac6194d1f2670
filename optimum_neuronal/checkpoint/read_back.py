"""Compares files of weights with the model that transformers loads from them.

Files may hold weights that the model does not, such as blocks for multi-token prediction. A save carries them over.
"""

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations.accelerate import load_offloaded_parameter

from ..compat import hf_private
from ..model.load_model import first_names, load_skeleton
from ..packed.packed_module import packed_modules
from ..packed.packed_weight import PREFIX
from ..packed.replacing import PackedHeader
from .names import CONFIG
from .packed_files import is_packed, on_meta, read_dense, read_json, source_files, stored_weights


COUNTS_BLOCKS = re.compile("num.*(mtp|nextn)|(mtp|nextn).*num")  # keys of configs: blocks for multi-token prediction


def find_extra(model: PreTrainedModel) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Return the tensors that only the model's checkpoint holds, mapped from its files, and names of those that cannot be had.

    Weights that were quantized there do not fit a dense model.
    """
    extra: dict[str, torch.Tensor] = {}
    lost: list[str] = []
    if not model.config.name_or_path:
        return extra, lost
    with suppress(OSError, ValueError):  # the checkpoint was moved, or is not in safetensors
        files = source_files(model)
        config = read_json(files[0].with_name(CONFIG)) if files else {}
        tensors = dict(stored_weights(files, is_packed(config)))
        if "quantization_config" in config and not is_packed(config):
            lost = hf_private.ignored_names(model, tensors)
        elif _is_whole(model, config):
            known = _densely_named(model, model.state_dict() | dict(model.named_buffers()))
            names = {name for name, _ in hf_private.as_loaded(model, on_meta(tensors.items()), known)} - known.keys()
            extra = {name: tensor for name, tensor in tensors.items() if name in names and PREFIX not in name}
    return extra, lost if extra else [*lost, *(f"{key} of config.json" for _, key in counts_of_blocks(model.config))]


def _is_whole(model: PreTrainedModel, config: Mapping[str, Any]) -> bool:
    """Return True if a model has the class and the number of blocks that the config.json of its checkpoint names."""
    own, text = model.config.get_text_config(decoder=True), config.get("text_config") or config
    is_named = type(model).__name__ in (config.get("architectures") or ())
    return is_named and text.get("num_hidden_layers") in (None, getattr(own, "num_hidden_layers", None))


def counts_of_blocks(config: PreTrainedConfig) -> list[tuple[PreTrainedConfig, str]]:
    """Return the parts and keys of a config that announce blocks for multi-token prediction."""
    parts = {id(part): part for part in (config, config.get_text_config(decoder=True))}.values()
    values = [
        (part, key, value) for part in parts for key, value in part.to_dict().items() if COUNTS_BLOCKS.search(key)
    ]
    return [(part, key) for part, key, value in values if isinstance(value, int) and value > 0]


def _densely_named(model: PreTrainedModel, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's tensors by the names of the dense model; of packed weights, their shape and dtype."""
    dense = {name: tensor for name, tensor in state.items() if PREFIX not in name}
    return dense | {name + module.suffix: module.weight for name, module in packed_modules(model)}


def find_faults(directory: Path, weights: Iterable[tuple[str, torch.Tensor | PackedHeader]]) -> list[str]:
    """Return how weights of a checkpoint, by name, differ from those that transformers loads. Raise if it has no such model."""
    model = load_skeleton(directory, trust_remote_code=False)
    expected = model.state_dict()
    loaded = dict(hf_private.as_loaded(model, on_meta(weights), expected))
    faults = {"lack": hf_private.missing_names(model, set(loaded))}
    faults["have another shape of"] = {n for n in expected.keys() & loaded if loaded[n].shape != expected[n].shape}
    return [
        f"the files {verb} {first_names(names)}, which transformers loads" for verb, names in faults.items() if names
    ]


def check_loadable(model: PreTrainedModel) -> None:
    """Raise `ValueError` unless transformers would load all weights from the files that a save writes."""
    weights = _densely_named(model, hf_private.untied(model, model.state_dict()))
    expected = dict(on_meta(weights.items()))
    stored = hf_private.as_stored(model, expected)
    loaded = dict(hf_private.as_loaded(model, stored.items(), expected))
    facts = {name: (weight.shape, weight.dtype) for name, weight in loaded.items()}
    if wrong := [name for name, weight in expected.items() if facts.get(name) != (weight.shape, weight.dtype)]:
        raise ValueError(f"transformers would not load {first_names(wrong)} from its files.")


def check_written(
    model: PreTrainedModel, folder: Path, packed: bool, extra: Mapping[str, torch.Tensor], dtype: torch.dtype | None
) -> None:
    """Raise `OSError` unless files in a folder hold a model and `extra`, rounded at most to `dtype`, by transformers' names."""
    weights = _densely_named(model, hf_private.untied(model, model.state_dict()))
    modules = {name + module.suffix: module for name, module in packed_modules(model)}
    expected, found = {**weights, **extra}, set()
    for name, tensor in hf_private.as_loaded(model, read_dense(folder, packed), weights):
        if name in expected:
            weight = modules[name].dense() if name in modules else in_memory(model, name, expected[name])
            if not (_same(tensor.to(weight), weight) or tensor.dtype == dtype and _same(tensor, weight.to(tensor))):
                raise OSError(f"{name} reads back with other values than were written.")
            found.add(name)
    if missing := expected.keys() - found:
        raise OSError(f"transformers would not load {first_names(missing)} from the files.")


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    bits = (tensor.detach().contiguous().flatten().view(torch.uint8) for tensor in (one, other))
    return one.shape == other.shape and torch.equal(*bits)


def in_memory(model: PreTrainedModel, name: str, tensor: torch.Tensor) -> torch.Tensor:
    return load_offloaded_parameter(model, name) if tensor.is_meta else tensor
