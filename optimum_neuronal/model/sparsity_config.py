"""The `sparsity_config` in config.json (docs/format.md), checked when it is read."""

import textwrap
from collections.abc import Mapping
from typing import Any, TypedDict, TypeGuard

from huggingface_hub.dataclasses import validate_typed_dict
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig


KEY = "sparsity_config"
VERSION = 1

Number = int | float


class _SparsityConfig(TypedDict, total=False):
    """What this package reads."""

    method: str
    sparsity: Number
    achieved_sparsity: Number
    block_sparsity: dict[str, Number]
    projections: dict[str, dict]
    left_out: list[str]
    config: dict
    calibration: dict
    base_model: str | None


class _Projection(TypedDict):
    sparsity: Number
    weights: list[str]
    numel: int | None


def is_own(value: Any) -> TypeGuard[dict[str, Any]]:
    """Return True for the sparsity_config of a model that this package pruned, and False for anything else."""
    return isinstance(value, dict) and value.get("version") == VERSION


def read_sparsity_config(config: PreTrainedConfig | Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the checked sparsity_config of a config, or of the content of config.json; None if it was not pruned."""
    value = config.get(KEY) if isinstance(config, Mapping) else getattr(config, KEY, None)
    if value is None:
        return None
    if not is_own(value):
        raise ValueError(
            f"{KEY} is {textwrap.shorten(str(value), 80)}: expected an object with version {VERSION}. If another tool wrote it, "
            f"remove it from config.json, or in Python del model.config.{KEY}."
        )
    if missing := {"sparsity", "achieved_sparsity"} - value.keys():
        raise ValueError(f"{KEY} has no {min(missing)!r}: save the model again.")
    projections = value.get("projections", {})
    try:
        validate_typed_dict(
            _SparsityConfig, {key: value[key] for key in _SparsityConfig.__annotations__ if key in value}
        )
        for entry in projections.values():
            validate_typed_dict(_Projection, {key: entry.get(key) for key in _Projection.__annotations__})
    except StrictDataclassError as error:
        raise ValueError(f"{KEY} is damaged: {textwrap.shorten(str(error), 300)}. Save the model again.") from error
    shares = [value["sparsity"], value["achieved_sparsity"], *value.get("block_sparsity", {}).values()]
    shares += [entry["sparsity"] for entry in projections.values()]
    if wrong := [share for share in shares if not 0 <= share <= 1]:
        raise ValueError(f"{KEY} is damaged: it has the sparsity {wrong[0]}, expected 0 to 1. Save the model again.")
    return value
