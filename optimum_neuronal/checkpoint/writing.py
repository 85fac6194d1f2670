"""Writes the configs and weights of a model, dense or packed, into an empty folder."""

import copy
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save
from transformers.utils.hub import convert_file_size_to_int

from ..compat import hf_private
from ..model.sparsity_config import put_sparsity_config
from ..model.zeros import find_sparsity_config
from ..packed.packed_module import dense_state, describe_weight, packed_modules
from ..packed.packed_weight import DTYPES, PREFIX
from ..packed.replacing import find_packable
from ..packed.sparsify import pack_weight
from .names import CONFIG, DENSE_INDEX, DENSE_PATTERN
from .packed_files import (
    QUANTIZATION_CONFIG,
    opened,
    read_json,
    source_files,
    stored_dtypes,
    write_json,
    write_packed,
)
from .read_back import check_written, counts_of_blocks, find_extra, in_memory
from .save_options import SaveOptions


OFFLOADED_SHARD = 10**9  # bytes of an offloaded model that are in memory at a time

MOVED = ("rope_theta", "partial_rotary_factor")  # into `rope_parameters` in transformers 5
OWN_NAMES = {"gpt_neox": {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}}
TWO_THETAS = ("gemma3_text", "gemma3n_text")  # families of transformers 4 in which layers differ

Convert = Callable[[str, torch.Tensor], torch.Tensor]  # a tensor's name and value -> what is written


def write_model(model: PreTrainedModel, folder: Path, options: SaveOptions) -> None:
    """Write the configs and weights of a model, which [`check_saveable`] has passed, into an empty folder."""
    dtype = None if options.dtype == model.dtype else options.dtype  # parameters in other dtypes stay as they are
    convert, packed = _converter(model, dtype, _finer_tensors(model)), options.format == "packed"
    extra, lost = find_extra(model)
    if packed:
        tensors, weights = _packed_state(model, convert)
        write_packed(folder, tensors | extra, weights, options.max_shard_size)
    else:
        _write_dense(model, folder, options.max_shard_size, convert, extra)
    check_written(model, folder, packed, extra, dtype)
    config = copy.deepcopy(model.config)
    config.architectures, config.dtype = [type(model).__name__], dtype or model.dtype
    put_sparsity_config(config, find_sparsity_config(model))
    for part, key in counts_of_blocks(config) if lost else ():
        setattr(part, key, 0)
    if packed:
        config.quantization_config = QUANTIZATION_CONFIG
    if model.is_remote_code():
        custom_object_save(model, folder, config=config)
    write_configs(model, config, folder)


def write_configs(model: PreTrainedModel, config: PreTrainedConfig, folder: Path) -> None:
    config.save_pretrained(folder)
    write_json(folder / CONFIG, with_older_names(read_json(folder / CONFIG)))
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def with_older_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json that says what is in `rope_parameters` as transformers 4 reads it too: it ignores that key."""
    added: dict[str, Any] = {}
    family, rope = config.get("model_type"), config.get("rope_parameters") or {}
    if family in TWO_THETAS and "full_attention" in rope:
        added["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    if "rope_theta" in rope:  # the same for all layers
        names = OWN_NAMES.get(family, {})
        added |= {names.get(name, name): rope[name] for name in MOVED if name in rope}
        scaling = {name: value for name, value in rope.items() if name not in MOVED}
        if family == "phi3" and "short_factor" in rope:  # version 4 accepts three fields
            scaling = {"type": rope["rope_type"]} | {name: rope[name] for name in ("short_factor", "long_factor")}
        added |= {} if scaling == {"rope_type": "default"} else {"rope_scaling": scaling}
    parts = {name: with_older_names(part) for name, part in config.items() if isinstance(part, dict)}
    return {**config, **added, **parts}


def _write_dense(
    model: PreTrainedModel,
    folder: Path,
    max_shard_size: int | str,
    convert: Convert,
    extra: Mapping[str, torch.Tensor],
) -> None:
    """Write the files that transformers' `save_pretrained` writes, with each tensor converted, and `extra` ones.

    Offloaded weights are read one file at a time. Experts, of which files hold parts, must fit into one file then.
    """
    state, size = hf_private.untied(model, dense_state(model)), convert_file_size_to_int(max_shard_size)
    offloaded = any(tensor.is_meta for tensor in state.values())
    if offloaded:
        size = min(size, OFFLOADED_SHARD)
    else:
        state = hf_private.as_stored(model, state)
    state |= extra
    split = split_torch_state_dict_into_shards(state, filename_pattern=DENSE_PATTERN, max_shard_size=size)
    weight_map, total = {}, 0
    for file, names in split.filename_to_tensors.items():
        tensors = {name: in_memory(model, name, state.pop(name)) for name in names}
        unchanged = {name: tensors.pop(name) for name in names if name in extra}
        if offloaded:
            tensors = hf_private.as_stored(model, tensors)
        tensors = {name: convert(name, tensor).contiguous() for name, tensor in tensors.items()} | unchanged
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    if split.is_sharded:
        metadata = {"total_parameters": model.num_parameters(), "total_size": total}
        write_json(folder / DENSE_INDEX, {"metadata": metadata, "weight_map": weight_map})


def _finer_tensors(model: PreTrainedModel) -> dict[str, Path]:
    """Return name -> file of tensors that the model's checkpoint has in a finer dtype than most, such as Mamba's `A_log`.

    transformers loads all in one dtype.
    """
    with suppress(OSError, ValueError):  # the checkpoint was moved, or is not in safetensors
        return stored_dtypes(source_files(model))[1]
    return {}


def _converter(model: PreTrainedModel, dtype: torch.dtype | None, finer: Mapping[str, Path]) -> Convert:
    """Return a function of a tensor's name and value that converts it, unless the model keeps it in float32.

    `finer` tensors get the dtype of the model's checkpoint, and its value unless it has changed since.
    """
    in_float32 = None if dtype is None else hf_private.names_in_float32(model, dtype)

    def convert(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name in finer:
            with opened(finer[name]) as file:
                source = file.get_tensor(name)
            if source.shape == tensor.shape:
                is_same = torch.equal(source.to(tensor.dtype), tensor.cpu())
                return source if is_same else tensor.to(source.dtype)
        if in_float32 is None or not tensor.is_floating_point() or in_float32.search(name):
            return tensor
        return tensor.to(dtype)

    return convert


def _packed_state(model: PreTrainedModel, convert: Convert) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the state dict of the model that [`sparsify`] would make, and what describes its packed weights."""

    def load(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return convert(name, in_memory(model, name, tensor))

    state = hf_private.untied(model, model.state_dict())
    tied = hf_private.tied_names(model)
    weights = {name: (m.dense_shape, m.transposed) for name, m in packed_modules(model)}
    for name, module in model.named_modules():
        places = find_packable(module, name)
        if not all(p.key in state and p.key not in tied and state[p.key].dtype in DTYPES for p in places):
            continue
        matrices: list[Any] = [pack_weight(load(place.key, state[place.key]), place.transposed) for place in places]
        if None not in matrices:  # all weights of an experts module, or none
            for place, matrix in zip(places, matrices):
                weights[place.path] = state.pop(place.key).shape, place.transposed
                state |= {f"{place.path}.{part}": tensor for part, tensor in matrix.stored().items()}
    tensors = {name: load(name, tensor) for name, tensor in sorted(state.items())}
    return tensors, {
        name: describe_weight(shape, tensors[f"{name}{PREFIX}values"].dtype, swapped)
        for name, (shape, swapped) in weights.items()
    }
