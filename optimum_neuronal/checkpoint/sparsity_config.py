"""The `sparsity_config` in config.json (docs/format.md), checked when it is read."""

from collections.abc import Iterable, Mapping
from typing import Any

from transformers import PreTrainedConfig


KEY = "sparsity_config"
VERSION = 1
TYPES = {  # of the keys that this package reads
    "sparsity": (int, float),
    "achieved_sparsity": (int, float),
    "block_sparsity": dict,
    "projections": dict,
    "bits_per_weight": (int, float, type(None)),
    "left_out": list,
    "head_weights": list,
    "config": dict,
    "calibration": dict,
    "base_model": (str, type(None)),
}


def read_sparsity_config(config: PreTrainedConfig | Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the checked sparsity_config of a config, or of the content of config.json; None if it was not pruned."""
    value = config.get(KEY) if isinstance(config, Mapping) else getattr(config, KEY, None)
    if value is None:
        return None
    if not isinstance(value, dict) or value.get("version") != VERSION:
        raise ValueError(f"{KEY} is {str(value)[:80]}: expected an object with version {VERSION}.")
    if missing := {"sparsity", "achieved_sparsity"} - value.keys():
        raise ValueError(f"{KEY} has no {min(missing)!r}: save the model again.")
    for key in TYPES.keys() & value.keys():
        if not isinstance(value[key], TYPES[key]):
            raise ValueError(f"{KEY}.{key} has the wrong type, {type(value[key]).__name__}: save the model again.")
    if not _is_complete(value):
        raise ValueError(f"{KEY} has blocks or projections without numbers and names: save the model again.")
    return value


def _is_complete(value: dict[str, Any]) -> bool:
    """Return True if every block and projection has its numbers, and every weight a name."""
    projections = value.get("projections", {}).values()
    if not all(isinstance(entry, dict) and isinstance(entry.get("weights"), list) for entry in projections):
        return False
    numbers = [*value.get("block_sparsity", {}).values(), *(entry.get("sparsity") for entry in projections)]
    numbers += [entry["bits"] for entry in projections if entry.get("bits") is not None]
    names = [
        *value.get("left_out", []),
        *value.get("head_weights", []),
        *(n for e in projections for n in e["weights"]),
    ]
    return all(isinstance(n, int | float) for n in numbers) and all(isinstance(n, str) for n in names)


def about_head(names: Iterable[str]) -> dict[str, Any]:
    """Return the entries of a sparsity_config for embeddings and head in 8 bits, by their names in the files."""
    return {"embedding_bits": 8, "head_weights": sorted(names)}
