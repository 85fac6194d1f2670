"""Pruned tiny checkpoints for tests of what reads files."""

import json
from pathlib import Path
from typing import Any

import torch
from conftest import make_model
from safetensors import safe_open

from optimum_neuronal import NeuronALConfig, NeuronALPruner


def save_pruned(
    directory: Path,
    family: str = "llama",
    tokenizer=None,
    overrides: dict | None = None,
    dtype: torch.dtype = torch.float32,
    format: str = "dense",
    **fields,
) -> Any:
    """Saves a pruned model, and returns it with its pruner."""
    model = make_model(family, **(overrides or {})).to(dtype)
    pruner = NeuronALPruner(NeuronALConfig(0.7, saliency="magnitude", topup="uniform", **fields), tokenizer)
    pruner.prune(model)
    pruner.save(model, directory, format)
    return pruner, model


def change_config(directory: Path, change) -> None:
    """Calls `change(config)` on what config.json holds, and writes it back."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def tensors_of(directory: Path) -> dict[str, Any]:
    """All tensors of the dense files in a directory."""
    found = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def all_files(directory: Path) -> dict[str, bytes]:
    """Content of every file below a directory."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def same(one: dict, other: dict) -> bool:
    """The same tensors by name: dtypes and values."""
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )
