"""Files of packed checkpoints (docs/format.md): ordinary safetensors with the buffers of packed modules, and an index.

A tensor is called `MODULE.packed_PART`. The metadata of each file say what the tensors of a module stand for.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel

from ..common.display import escaped
from ..model.origin import checkpoint_folder
from ..model.sources import listed_files
from ..packed.packed_weight import DTYPES, FORMAT, PREFIX, STORED, PackedWeight
from ..packed.replacing import PackedHeader
from .names import CONFIG, DENSE_FILE, DENSE_INDEX, PACKED_INDEX, QUANT_METHOD, SUFFIX, WEIGHT_FILES


VERSION = 1
METADATA = "neuronal"  # key in a file's metadata
QUANTIZATION_CONFIG = {"quant_method": QUANT_METHOD, "format": "packed", "version": VERSION}
WEIGHT_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}


def is_packed(config: Mapping[str, Any]) -> bool:
    """Return True if this config.json belongs to a packed checkpoint. Raise `ValueError` for another version."""
    quantization = config.get("quantization_config")
    if not isinstance(quantization, Mapping) or quantization.get("quant_method") != QUANT_METHOD:
        return False
    check_version(quantization)
    return True


def check_version(quantization: Mapping[str, Any]) -> None:
    """Raise `ValueError` unless a `quantization_config` has this format and version."""
    format, version = quantization.get("format"), quantization.get("version")
    if format != "packed" or type(version) is not int or version != VERSION:
        raise ValueError(
            f"The checkpoint has the format {format!r}, version {version!r}: expected 'packed', version {VERSION}. "
            "Install the version of optimum_neuronal that wrote it, or a later one."
        )


def write_packed(
    folder: Path, tensors: Mapping[str, torch.Tensor], weights: Mapping[str, Any], max_shard_size: int | str
) -> None:
    """Write tensors by name, and module path -> `format`, `shape`, `dtype` and `transposed` of its packed weight."""
    split = split_torch_state_dict_into_shards(dict(tensors), max_shard_size=max_shard_size)
    shards, weight_map = list(split.filename_to_tensors.values()), {}
    for number, names in enumerate(shards, 1):
        file = f"packed-{number:05}-of-{len(shards):05}{SUFFIX}"
        modules = sorted({name.rpartition(PREFIX)[0] for name in names if PREFIX in name})
        about = {"version": VERSION, "weights": {module: weights[module] for module in modules}}
        content = {name: tensors[name].detach().cpu().contiguous() for name in names}
        save_file(content, folder / file, metadata={"format": "pt", METADATA: json.dumps(about)})
        weight_map |= dict.fromkeys(names, file)
    write_json(folder / PACKED_INDEX, {"metadata": split.metadata, "weight_map": weight_map})


def read_headers(files: Iterable[str | Path]) -> dict[str, PackedHeader]:
    """Return module path -> its packed weight, of which only headers are read."""
    weights: dict[str, dict[str, Any]] = {}
    tensors: dict[str, dict[str, torch.Tensor]] = {}
    for path in files:
        with opened(path) as file:
            weights |= _read_metadata(path, file.metadata())
            for name in file.keys():  # noqa: SIM118
                module, is_part, part = name.rpartition(PREFIX)
                if is_part:
                    tensors.setdefault(module, {})[STORED + part] = file.get_tensor(name)
    if unequal := sorted(weights.keys() ^ tensors.keys()):
        lacking = "metadata" if unequal[0] in tensors else "tensors"
        raise _damaged(f"The packed weight of {unequal[0]}", f"it has no {lacking}")
    try:
        return {name: _header(facts, tensors[name]) for name, facts in weights.items()}
    except (KeyError, TypeError) as error:
        raise _damaged("The packed checkpoint", f"metadata {error!r}") from error


def _header(facts: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> PackedHeader:
    if facts["format"] != FORMAT:
        raise ValueError(
            f"The checkpoint has a weight in the format {facts['format']!r}: expected {FORMAT!r}. Read it with the "
            "version of optimum_neuronal that wrote it, or prune the dense model again."
        )
    dtype = WEIGHT_DTYPES[facts["dtype"]]
    return PackedHeader(tuple(facts["shape"]), dtype, tensors, facts.get("transposed", False))


def _damaged(what: str | Path, why: object) -> ValueError:
    return ValueError(f"{escaped(what)} is damaged: {escaped(why)}. Download or save it again.")


@contextmanager
def opened(path: str | Path) -> Iterator[Any]:
    """Open a file of safetensors. Raise `ValueError` if it is damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise _damaged(path, error) from error


def _read_metadata(path: str | Path, metadata: Mapping[str, str] | None) -> dict[str, dict[str, Any]]:
    try:
        about = json.loads((metadata or {})[METADATA])
        if type(about["version"]) is not int or about["version"] != VERSION:
            raise ValueError(f"it has version {about['version']!r}, expected {VERSION}")
        return dict(about["weights"])
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise _damaged(path, f"its metadata, {error}") from error


def weight_files(folder: Path, packed: bool) -> list[Path]:
    """Return the files with the weights of a checkpoint. Raise `ValueError` if the index names one in another folder."""
    index = PACKED_INDEX if packed else DENSE_INDEX
    if not packed and (folder / DENSE_FILE).exists():  # transformers' choice, even if a save of its own left an index
        return [folder / DENSE_FILE]
    if not packed and not (folder / index).exists():
        raise FileNotFoundError(f"{folder} has neither {DENSE_FILE} nor {index}: expected weights in one of these.")
    return [folder / name for name in listed_files(folder / index)]


def read_source(model: PreTrainedModel) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the tensors of the checkpoint that a model was loaded from, mapped, and its config; empty if they are not here."""
    with suppress(OSError, ValueError):  # it was moved, or is not in safetensors
        if folder := checkpoint_folder(model, local_files_only=True):
            is_dense = any((folder / name).exists() for name in (DENSE_FILE, DENSE_INDEX))
            return map_tensors(weight_files(folder, packed=not is_dense)), read_json(folder / CONFIG)
    return {}, {}


def map_tensors(files: Iterable[Path]) -> dict[str, torch.Tensor]:
    """Return name -> tensor of files of weights, mapped: elements are read when they are used."""
    tensors = {}
    for path in files:
        with opened(path) as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return tensors


def stored_dtypes(tensors: Mapping[str, torch.Tensor]) -> tuple[torch.dtype | None, dict[str, torch.Tensor]]:
    """Return the floating-point dtype of most elements of tensors, not of 8 bits, and the tensors in a finer one."""
    floats = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point() and tensor.itemsize > 1}
    sizes: Counter[torch.dtype] = Counter()
    for tensor in floats.values():
        sizes[tensor.dtype] += tensor.numel()
    most = max(sizes, key=lambda dtype: sizes[dtype], default=None)
    return most, {name: tensor for name, tensor in floats.items() if torch.promote_types(tensor.dtype, most) != most}


def read_weights(folder: Path, packed: bool) -> Iterator[tuple[str, torch.Tensor | PackedWeight, PackedHeader | None]]:
    """Yield the weights of a checkpoint: name, weight and, if it is packed, header. Packed weights are checked.

    The names are those of the dense model's parameters: `MODULE.weight`, or the module path itself for stacked experts.
    """
    files = weight_files(folder, packed)
    headers = read_headers(files) if packed else {}
    for name, tensor in map_tensors(files).items():
        if name.rpartition(PREFIX)[0] not in headers:
            yield name, tensor, None
    for module, header in headers.items():
        try:
            matrix = header.matrix()
        except ValueError as error:
            raise _damaged(f"The packed weight of {module}", error) from error
        yield module if len(header.shape) > 2 else f"{module}.weight", matrix, header


def stored_size(directory: str | Path) -> int:
    """Return the bytes of all files of weights in a directory."""
    return sum(path.stat().st_size for pattern in WEIGHT_FILES for path in Path(directory).glob(pattern))


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise _damaged(path, error) from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}: expected a JSON object.")
    return value


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
