"""The `sparsity_config` of a checkpoint's config.json: made after a prune, checked when it is read.

Its format is documented in docs/format.md and by sparsity_config.schema.json beside this file.
"""

import copy
import json
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from ..model.projections import Decoder, Projection
from ..model.set_config import set_config
from ..model.weight_names import every_projection, kind_of
from ..report import PruningReport
from .schema import check


KEY = "sparsity_config"
VERSION = 1


@cache
def load_schema() -> dict[str, Any]:
    """Return the JSON schema of this version."""
    return json.loads(Path(__file__).with_name("sparsity_config.schema.json").read_text(encoding="utf-8"))


def read_sparsity_config(config: PreTrainedConfig | Mapping[str, Any]) -> dict[str, Any] | None:
    """Return how a model was pruned, or None if it was not pruned.

    Args:
        config (`PreTrainedConfig` or `dict`): of the model, or the content of its config.json.

    Returns:
        `dict`: see docs/format.md; unknown keys included.

    Raises:
        `ValueError`: it has another version, or values of a wrong type or out of range.
    """
    value = config.get(KEY) if isinstance(config, Mapping) else getattr(config, KEY, None)
    if value is None:
        return None
    check(value, {"type": "object", "required": ["version"]}, KEY)
    check(value["version"], {"type": "integer", "minimum": 1}, f"{KEY}.version")
    if value["version"] != VERSION:
        raise ValueError(
            f"{KEY}.version is {value['version']}: this release of optimum_neuronal reads version {VERSION}. Install the "
            "release that the model was made with (its neuronal_report.json names it), or a later one."
        )
    check(value, load_schema(), KEY)
    return value


def record_embedding_bits(config: PreTrainedConfig, names: Iterable[str]) -> None:
    """Note in the sparsity_config of a model, if it has one, that these weights have 8 bits now."""
    if isinstance(value := getattr(config, KEY, None), Mapping):
        setattr(config, KEY, {**value, **about_head(names)})


def forget_sparsity(config: PreTrainedConfig) -> None:
    """Remove the sparsity_config of a model whose zeros are gone."""
    config.__dict__.pop(KEY, None)


def about_head(names: Iterable[str]) -> dict[str, Any]:
    """Return the entries of a sparsity_config for embeddings and head in 8 bits, by their names in the files."""
    return {"embedding_bits": 8, "head_weights": sorted(names)}


def make_sparsity_config(
    decoder: Decoder, report: PruningReport, weight_names: Mapping[str, list[str]]
) -> dict[str, Any]:
    """Return the part of a report that a pruned model's config keeps: enough to verify and to repeat the prune.

    Args:
        decoder ([`Decoder`]): the model's blocks and projections.
        report ([`PruningReport`]): of the prune.
        weight_names (`Mapping[str, list[str]]`): from [`stored_names`].
    """
    kinds = _projections_by_kind(decoder, report, weight_names)
    return {
        "version": VERSION,
        "quant_method": "neuronal",
        "format": "dense",  # a model in memory is dense; packed files say "packed"
        "sparsity": report.requested_sparsity,
        "achieved_sparsity": report.achieved_sparsity,
        "block_sparsity": dict(report.blocks),
        "projections": kinds,
        "bits_per_weight": None if report.config.get("bits_per_weight") is None else report.bits_per_weight,
        **(about_head(report.head_roundings) if report.head_roundings else {}),
        "left_out": [
            projection.name
            for block, projection in every_projection(decoder)
            if not projection.pruned and block.name in report.blocks and kind_of(block, projection) in kinds
        ],
        "block_lambda": report.block_lambda,
        "row_lambda": report.row_lambda,
        "calibration": report.calibration,
        "config": report.config,
        "versions": report.versions,
    }


def record_sparsity(model: PreTrainedModel, sparsity_config: Mapping[str, Any]) -> None:
    """Write into a model's config how it was pruned.

    A dense model may share the config object: this model gets a config of its own.

    Args:
        model (`PreTrainedModel`): the pruned model.
        sparsity_config (`Mapping[str, Any]`): from [`make_sparsity_config`].
    """
    own = copy.copy(model.config)
    setattr(own, KEY, sparsity_config)
    set_config(model, own)


def _projections_by_kind(
    decoder: Decoder, report: PruningReport, weight_names: Mapping[str, list[str]]
) -> dict[str, dict[str, Any]]:
    """Return the entry of each kind of projection: zeros and mean bits of all pruned ones, and their names and layout."""
    kinds: dict[str, list[Projection]] = {}
    for block, projection in every_projection(decoder):
        kinds.setdefault(kind_of(block, projection), []).append(projection)
    entries = {}
    for kind, projections in kinds.items():
        if pruned := [projection for projection in projections if projection.pruned]:
            zeros = sum(round(report.projections[p.name]["sparsity"] * p.numel) for p in pruned)
            entries[kind] = {"sparsity": zeros / sum(p.numel for p in pruned), "weights": weight_names[kind]}
            if "bits" in report.projections[pruned[0].name]:
                bits = sum(report.projections[p.name]["bits"] * p.numel for p in pruned)
                entries[kind]["bits"] = bits / sum(p.numel for p in pruned)
            if any(projection.transposed for projection in projections):
                entries[kind]["transposed"] = True
    return entries
