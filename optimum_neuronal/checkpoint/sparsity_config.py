"""The `sparsity_config` in config.json (docs/format.md): made after a prune, checked when it is read."""

import copy
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers import PreTrainedConfig, PreTrainedModel

from ..compat.hf_private import set_config
from ..model.projections import Decoder, Projection, every_projection, kind_of
from ..report import PruningReport


KEY = "sparsity_config"
VERSION = 1
# A folder of the Hub's cache: models--OWNER--NAME/snapshots/REVISION
SNAPSHOT = re.compile(r"models--([^/]+)/snapshots/[^/]+/?$")
TYPES = {  # of the keys that this package reads
    "sparsity": (int, float),
    "achieved_sparsity": (int, float),
    "block_sparsity": dict,
    "projections": dict,
    "bits_per_weight": (int, float, type(None)),
    "left_out": list,
    "head_weights": list,
    "config": dict,
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
    return value


def record_embedding_bits(config: PreTrainedConfig, names: Iterable[str]) -> None:
    """Record in a model's sparsity_config, if it has one, that these weights have 8 bits now."""
    if isinstance(value := getattr(config, KEY, None), Mapping):
        setattr(config, KEY, {**value, **about_head(names)})


def about_head(names: Iterable[str]) -> dict[str, Any]:
    """Return the entries of a sparsity_config for embeddings and head in 8 bits, by their names in the files."""
    return {"embedding_bits": 8, "head_weights": sorted(names)}


def make_sparsity_config(
    decoder: Decoder, report: PruningReport, weight_names: Mapping[str, list[str]]
) -> dict[str, Any]:
    """Return what a pruned model's config keeps of the report; `weight_names` are those of [`stored_names`]."""
    kinds = _projections_by_kind(decoder, report, weight_names)
    return {
        "version": VERSION,
        "quant_method": "neuronal",
        "base_model": hub_id(decoder.model),
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
    """Write a sparsity_config into a copy of the model's config, which a dense model may share."""
    own = copy.copy(model.config)
    setattr(own, KEY, sparsity_config)
    set_config(model, own)


def hub_id(model: PreTrainedModel) -> str | None:
    """Return the id of the repository on the Hub that a model was loaded from, or None."""
    origin = model.config.name_or_path
    if not origin:
        return None
    if (path := Path(origin)).exists():
        cached = SNAPSHOT.search(path.absolute().as_posix())
        return cached[1].replace("--", "/") if cached else None
    with suppress(HFValidationError):
        validate_repo_id(origin)
        return origin
    return None


def _projections_by_kind(
    decoder: Decoder, report: PruningReport, weight_names: Mapping[str, list[str]]
) -> dict[str, dict[str, Any]]:
    """Return, for each kind of projection, sparsity and mean bits of the pruned ones, their names and layout."""
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
