"""Writes the configs and weights of a model, dense or packed, into an empty folder."""

import copy
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save
from transformers.integrations.accelerate import load_offloaded_parameter
from transformers.utils.hub import convert_file_size_to_int

from ..common.validation import check_choice
from ..compat import hf_private
from ..model.load_model import first_names, skeleton_of
from ..model.sparsity import find_sparsity_config, put_sparsity_config
from ..packed.packed_module import dense_state, describe_weight, packed_modules
from ..packed.packed_weight import DTYPES, PREFIX
from ..packed.replacing import find_packable
from ..packed.sparsify import pack_weight
from .names import CONFIG, DENSE_INDEX, DENSE_PATTERN, FORMATS
from .packed_files import (
    QUANTIZATION_CONFIG,
    is_packed,
    map_tensors,
    read_json,
    read_source,
    stored_dtypes,
    weight_files,
    write_json,
    write_packed,
)


SHARD_SIZE = "50GB"  # as in transformers
OFFLOADED_SHARD = 10**9  # bytes of an offloaded model that are in memory at a time

EXTRA_BLOCKS = re.compile("num.*(mtp|nextn).*|(mtp|nextn).*num.*")  # keys of configs
MOVED = ("rope_theta", "partial_rotary_factor")  # into `rope_parameters` in transformers 5
OWN_NAMES = {"gpt_neox": {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}}
TWO_THETAS = ("gemma3_text", "gemma3n_text")  # families of transformers 4 in which layers differ

Tensors = Mapping[str, torch.Tensor]
Convert = Callable[[str, torch.Tensor], torch.Tensor]  # a tensor's name and value -> what is written


@dataclass(frozen=True)
class SaveOptions:
    """How a model is written. Checked when made.

    Args:
        format (`str`, *optional*): `"dense"` or `"packed"`. None: packed if the model computes with packed weights.
        dtype (`torch.dtype`, *optional*): of the files. None: the model's.
        max_shard_size (`int` or `str`): bytes of a file of weights, or text such as `"500MB"`.

    Raises:
        `TypeError`, `ValueError`: the format is unknown or does not support the dtype.
    """

    format: str | None = None
    dtype: torch.dtype | None = None
    max_shard_size: int | str = SHARD_SIZE

    def __post_init__(self) -> None:
        if self.format is not None:
            check_choice("format", self.format, FORMATS)
        if self.dtype is not None and not (isinstance(self.dtype, torch.dtype) and self.dtype.is_floating_point):
            raise TypeError(
                f"The dtype to save in is {self.dtype!r}: expected a floating-point one, such as torch.bfloat16."
            )
        if self.format == "packed" and self.dtype not in (None, *DTYPES):
            raise ValueError(
                f"The packed format does not support {self.dtype}: expected one of {', '.join(map(str, DTYPES))}."
            )


def write_model(model: PreTrainedModel, folder: Path, options: SaveOptions) -> None:
    """Write the configs and weights of a model, which [`check_saveable`] has passed, into an empty folder."""
    dtype = None if options.dtype == model.dtype else options.dtype  # parameters in other dtypes stay as they are
    convert, packed = _converter(model, dtype, stored_dtypes(read_source(model)[0])[1]), options.format == "packed"
    extra, lost = find_extra(model)
    if packed:
        state, weights = _packed_state(model, convert)
        write_packed(folder, state | extra, weights, options.max_shard_size)
    else:
        _write_dense(model, folder, options.max_shard_size, convert, extra)
        state = hf_private.untied(model, dense_state(model))
    stored = map_tensors(weight_files(folder, packed))
    _check_written(model, hf_private.as_loaded(model, stored, state), state | extra)
    config = copy.deepcopy(model.config)
    config.architectures, config.dtype = [type(model).__name__], dtype or model.dtype
    put_sparsity_config(config, find_sparsity_config(model))
    config.get_text_config(decoder=True).update(_no_extra_blocks(config) if lost else {})
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


def _write_dense(model: PreTrainedModel, folder: Path, size: int | str, convert: Convert, extra: Tensors) -> None:
    """Write the files that transformers' `save_pretrained` writes, with each tensor converted, and `extra` ones.

    Offloaded weights are read one file at a time. Experts, of which files hold parts, must fit into one file then.
    """
    state, size = hf_private.untied(model, dense_state(model)), convert_file_size_to_int(size)
    offloaded = any(tensor.is_meta for tensor in state.values())
    if offloaded:
        size = min(size, OFFLOADED_SHARD)
    else:
        state = hf_private.as_stored(model, state)
    state |= extra
    split = split_torch_state_dict_into_shards(state, filename_pattern=DENSE_PATTERN, max_shard_size=size)
    weight_map, total = {}, 0
    for file, names in split.filename_to_tensors.items():
        tensors = {name: _in_memory(model, name, state.pop(name)) for name in names}
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


def _in_memory(model: PreTrainedModel, name: str, tensor: torch.Tensor) -> torch.Tensor:
    return load_offloaded_parameter(model, name) if tensor.is_meta else tensor


def _check_written(model: PreTrainedModel, found: Iterable[tuple[str, torch.Tensor]], expected: Tensors) -> None:
    """Raise `OSError` unless what transformers makes of files is what was to be written, bit for bit or rounded."""
    missing = set(expected)
    for name, tensor in found:
        if name in expected:
            weight = _in_memory(model, name, expected[name])
            is_rounded = tensor.itemsize > 1 and _same(tensor, weight.to(tensor))
            if not is_rounded and not _same(tensor.to(weight), weight):
                raise OSError(f"{name} is read back with other values than were written.")
            missing.discard(name)
    if missing:
        raise OSError(f"transformers would not load {first_names(missing)}.")


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    bits = (tensor.contiguous().flatten().view(torch.uint8) for tensor in (one, other))
    return one.shape == other.shape and torch.equal(*bits)


def find_extra(model: PreTrainedModel) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Return the tensors that only the model's checkpoint holds, and the names of those that a save loses.

    transformers ignores them, such as blocks for multi-token prediction. Quantized ones do not fit a dense model.
    """
    (tensors, config), extra = read_source(model), {}
    quantized = config.get("quantization_config") is not None and not is_packed(config)
    lost = hf_private.ignored_names(model, tensors) if quantized else []
    if not quantized and _is_whole(model, config):
        own = model.state_dict()
        others = {name: tensor for name, tensor in tensors.items() if name not in own and PREFIX not in name}
        extra = {name: others[name] for name in hf_private.match_names(skeleton_of(model), others)[1]}
    if model.config.name_or_path and not extra:
        lost += [f"the blocks of {key}" for key in _no_extra_blocks(model.config)]
    return extra, lost


def _is_whole(model: PreTrainedModel, config: Mapping[str, Any]) -> bool:
    """Return True if a model has the class and the number of blocks that the config of its checkpoint names."""
    own, text = model.config.get_text_config(decoder=True), config.get("text_config") or config
    is_named = type(model).__name__ in (config.get("architectures") or ())
    key = own.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    return is_named and text.get(key) in (None, getattr(own, key, None))


def _no_extra_blocks(config: PreTrainedConfig) -> dict[str, int]:
    """Return the values of a config that announce no blocks for multi-token prediction, where it does now."""
    values = config.get_text_config(decoder=True).to_dict().items()
    return {key: 0 for key, value in values if EXTRA_BLOCKS.fullmatch(key) and type(value) is int and value}


def _converter(model: PreTrainedModel, dtype: torch.dtype | None, finer: Tensors) -> Convert:
    """Return a function of a tensor's name and value that converts it, unless the model keeps it in float32.

    `finer` tensors get the dtype of the model's checkpoint, and its value unless it has changed since.
    """
    loaded: dict[str, torch.Tensor] = {}
    with suppress(ValueError):  # `finer` holds some, but not all, experts of a layer
        loaded.update(hf_private.as_loaded(model, finer, model.state_dict()))
    # Dense files may have other names than the model and packed files.
    finer = {**finer, **hf_private.as_stored(model, loaded), **loaded}
    in_float32 = None if dtype is None else hf_private.names_in_float32(model, dtype)

    def convert(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name in finer:
            source = finer[name]
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
        return convert(name, _in_memory(model, name, tensor))

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
