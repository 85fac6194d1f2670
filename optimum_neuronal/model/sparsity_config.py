"""The `sparsity_config` in config.json (docs/format.md), checked when it is read, and the weights that it names."""

import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

from huggingface_hub.dataclasses import validate_typed_dict
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig

from .projections import with_stars


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


def read_sparsity_config(config: PreTrainedConfig | Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the checked sparsity_config of a config, or of the content of config.json; None if it was not pruned."""
    value = config.get(KEY) if isinstance(config, Mapping) else getattr(config, KEY, None)
    if value is None:
        return None
    if not isinstance(value, dict) or value.get("version") != VERSION:
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


def natural_order(name: str) -> list[tuple[bool, int, str]]:
    """Return a key that sorts `layers.2` before `layers.10`."""
    return [(part.isdecimal(), len(part) if part.isdecimal() else 0, part) for part in name.split(".")]


def _fill(name: str, numbers: Iterable[str]) -> str:
    rest = iter(numbers)
    return ".".join(next(rest, part) if part == "*" else part for part in name.split("."))


@dataclass(frozen=True)
class StoredProjection:
    """The projection of a stored weight, or the projections of all experts in it."""

    block: str  # full name
    kind: str  # see `kind_of`
    left_out: frozenset[str] = frozenset()  # numbers of the experts in a stacked weight that were not pruned


class PrunedWeights:
    """What a `sparsity_config` names: the pruned projection of each weight in a checkpoint's files."""

    def __init__(self, sparsity_config: Mapping[str, Any]):
        self.blocks = sparsity_config.get("block_sparsity", {})
        self.left_out = set(sparsity_config.get("left_out", []))
        kinds = sparsity_config.get("projections", {})
        self._kinds = {name: kind for kind, about in kinds.items() for name in about["weights"]}
        self._block = with_stars(next(iter(self.blocks), ""))
        for kind in kinds:  # names in packed files: those of the model
            self._kinds.setdefault(f"{self._block}.{kind}.weight", kind)
            self._kinds.setdefault(f"{self._block}.{kind.replace('.*.', '.')}", kind)  # stacked experts

    def find(self, name: str) -> StoredProjection | None:
        """Return the pruned projection of a stored weight, if it is one.

        The name may have a different prefix than in the config, for example if a model was saved without its head.
        """
        starred = with_stars(name)
        alike = (known for known in self._kinds if known.endswith(f".{starred}") or starred.endswith(f".{known}"))
        kind = self._kinds.get(starred if starred in self._kinds else next(alike, ""))
        if kind is None:
            return None
        numbers, depth = [part for part in name.split(".") if part.isdecimal()], self._block.count("*")
        block = _fill(self._block, numbers[:depth])
        if block not in self.blocks:
            return None
        full = _fill(f"{block}.{kind}", numbers[depth:])
        if full in self.left_out:
            return None
        before, star, after = full.partition("*")  # a star: all experts are in one weight
        left_out = {name for name in self.left_out if star and name.startswith(before) and name.endswith(after)}
        left_out = frozenset(name.removeprefix(before).removesuffix(after) for name in left_out)
        return StoredProjection(block, kind, left_out)
