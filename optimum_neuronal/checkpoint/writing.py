"""Writes the configs and weights of a model, dense or packed, into an empty folder."""

import copy
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save
from transformers.integrations.accelerate import load_offloaded_parameter
from transformers.utils.hub import convert_file_size_to_int

from ..compat import hf_private
from ..compat.peft import all_adapter_layers
from ..packed.packed_linear import is_linear
from ..packed.packed_module import describe_weight, packed_modules
from ..packed.packed_weight import DTYPES, PREFIX
from ..packed.replacing import keeps_transposed, packable_paths
from ..packed.sparsify import DenseSaving, pack_weight
from .names import CONFIG, DENSE_INDEX, SUFFIX
from .packed_files import (
    QUANTIZATION_CONFIG,
    float_tensors,
    opened,
    read_json,
    source_files,
    write_json,
    write_packed,
)


SHARD_SIZE = "50GB"  # as in transformers
OFFLOADED_SHARD = 10**9  # bytes of an offloaded model that are in memory at a time


def write_model(
    model: PreTrainedModel,
    folder: Path,
    format: str,
    max_shard_size: int | str,
    dtype: torch.dtype | None,
) -> None:
    """Write the configs and weights of a model, which [`check_writable_model`] has passed, into an empty folder."""
    model = hf_private.uncompiled(model)
    dtype = None if dtype == model.dtype else dtype  # parameters that are kept in another dtype stay as they are
    if format == "packed":
        return _write_packed(model, folder, max_shard_size, dtype)
    if next(packed_modules(model), None) is not None and getattr(model, "hf_quantizer", None) is None:
        model.hf_quantizer = DenseSaving(None)  # only a part of the model was given to `sparsify`
    if any(parameter.is_meta for parameter in model.parameters()):
        size = min(convert_file_size_to_int(max_shard_size), OFFLOADED_SHARD)
        with hf_private.temporary_device_map(model):
            model.save_pretrained(folder, max_shard_size=size)
    else:
        model.save_pretrained(folder, max_shard_size=max_shard_size)
    finer = _finer_tensors(model)
    if dtype is not None or finer:
        _convert_files(folder, _converter(model, dtype, finer))
    if dtype is not None:
        write_json(folder / CONFIG, {**read_json(folder / CONFIG), "dtype": str(dtype).removeprefix("torch.")})


def check_writable_model(model: PreTrainedModel) -> None:
    """Raise for a model that [`write_model`] could not write."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"Expected a PreTrainedModel, got a {type(model).__name__}. Merge adapters before you save.")
    if next(all_adapter_layers(model), None) is not None:
        raise ValueError(
            "The model carries adapters: merge them first, with PEFT's merge_and_unload(), or save them alone."
        )
    for name, module in model.named_modules():
        if hf_private.uncompiled(module) is not module:
            raise ValueError(f"torch.compile wraps {name}, whose weights would be lost: put its _orig_mod back first.")
        if is_linear(type(module)) and "weight" not in dict(module.named_parameters(recurse=False)):
            raise ValueError(
                f"A hook or parametrization computes the weight of {name}, which would be lost: make it permanent first, as "
                "with torch.nn.utils.prune.remove."
            )
    try:
        hf_private.untied_state(model)
        with tempfile.TemporaryDirectory() as folder:
            _write_configs(model, copy.deepcopy(model.config), Path(folder))
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"The model cannot be saved: {error}") from error


def _write_configs(model: PreTrainedModel, config: PreTrainedConfig, folder: Path) -> None:
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def _convert_files(folder: Path, convert: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
    """Convert the tensors of a dense checkpoint, one file after the other. transformers' `save_pretrained` cannot."""
    total = 0
    for path in folder.glob(f"*{SUFFIX}"):
        tensors = {name: convert(name, tensor) for name, tensor in load_file(path).items()}
        total += sum(tensor.nbytes for tensor in tensors.values())
        save_file(tensors, converted := path.with_suffix(".converted"), metadata={"format": "pt"})
        converted.replace(path)
    if (index := folder / DENSE_INDEX).exists():
        content = read_json(index)
        write_json(index, {**content, "metadata": {**content["metadata"], "total_size": total}})


def _finer_tensors(model: PreTrainedModel) -> dict[str, Path]:
    """Return name -> file of tensors that the model's checkpoint has in a larger dtype than most, such as Mamba's `A_log`.

    transformers loads all in one dtype.
    """
    files: dict[str, Path] = {}
    dtypes: dict[str, torch.dtype] = {}
    sizes: Counter[torch.dtype] = Counter()
    with suppress(OSError, ValueError):  # the checkpoint was moved, or is not in safetensors
        for path in source_files(model):
            for name, dtype, numel in float_tensors(path):
                files[name], dtypes[name] = path, dtype
                sizes[dtype] += numel
    most = max(sizes, key=lambda dtype: sizes[dtype], default=torch.float64)
    return {name: path for name, path in files.items() if dtypes[name].itemsize > most.itemsize}


def _converter(
    model: PreTrainedModel, dtype: torch.dtype | None, finer: Mapping[str, Path]
) -> Callable[[str, torch.Tensor], torch.Tensor]:
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


def _write_packed(model: PreTrainedModel, folder: Path, max_shard_size: int | str, dtype: torch.dtype | None) -> None:
    write_packed(folder, *_packed_state(model, dtype), max_shard_size)
    config = copy.deepcopy(model.config)
    config.architectures, config.dtype = [type(model).__name__], dtype or model.dtype
    if model.is_remote_code():
        custom_object_save(model, folder, config=config)
    _write_configs(model, config, folder)
    write_json(folder / CONFIG, {**read_json(folder / CONFIG), "quantization_config": QUANTIZATION_CONFIG})


def _packed_state(model: PreTrainedModel, dtype: torch.dtype | None) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the state dict of the model that [`sparsify`] would make, and what describes its packed weights."""
    convert = _converter(model, dtype, _finer_tensors(model))

    def load(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return convert(name, load_offloaded_parameter(model, name) if tensor.is_meta else tensor)

    state = hf_private.untied_state(model)
    tied = hf_private.tied_names(model)
    weights = {name: (m.dense_shape, m.transposed) for name, m in packed_modules(model)}
    for name, module in model.named_modules():
        keys = {path: path if path != name else f"{path}.weight" for path in packable_paths(module, name)}
        if not all(key in state and key not in tied and state[key].dtype in DTYPES for key in keys.values()):
            continue
        transposed = {path: keeps_transposed(model, path) for path in keys}
        matrices: dict[str, Any] = {
            path: pack_weight(load(key, state[key]), transposed[path]) for path, key in keys.items()
        }
        if None not in matrices.values():  # all weights of an experts module, or none
            for path, matrix in matrices.items():
                weight = state.pop(keys[path])
                weights[path] = weight.shape, transposed[path]
                state |= {f"{path}.{part}": tensor for part, tensor in matrix.stored().items()}
    tensors = {name: load(name, tensor) for name, tensor in sorted(state.items())}
    return tensors, {
        name: describe_weight(shape, tensors[f"{name}{PREFIX}values"].dtype, swapped)
        for name, (shape, swapped) in weights.items()
    }
