"""The `sparsity_config` of a checkpoint's config.json: made after a prune, checked whenever it is read.

Its format is documented in docs/format.md and by sparsity_config.schema.json beside this file.
"""

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from .projections import Block, Decoder, Projection
from .report import PruningReport
from .schema import check


KEY = "sparsity_config"
VERSION = 1


@cache
def load_schema() -> dict[str, Any]:
    """The JSON schema of this version."""
    return json.loads(Path(__file__).with_name("sparsity_config.schema.json").read_text(encoding="utf-8"))


def read_sparsity_config(config: PreTrainedConfig | Mapping[str, Any]) -> dict[str, Any] | None:
    """How a model was pruned, or None if it was not.

    Args:
        config (`PreTrainedConfig` or `dict`): of the model, or what its config.json holds.

    Returns:
        `dict`: as docs/format.md tells, unknown keys included.

    Raises:
        `ValueError`: another version's, or values of a wrong type or out of range.
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


def make_sparsity_config(
    decoder: Decoder, report: PruningReport, weight_names: Mapping[str, list[str]]
) -> dict[str, Any]:
    """What a pruned model's config keeps of the report: enough to know, to verify and to repeat what was done.

    Args:
        decoder ([`Decoder`]): the model's blocks and projections.
        report ([`PruningReport`]): of the prune.
        weight_names (`Mapping[str, list[str]]`): from [`stored_names`].
    """
    kinds = _sparsity_by_kind(decoder, report)
    return {
        "version": VERSION,
        "quant_method": "neuronal",
        "format": report.config["format"],
        "sparsity": report.requested_sparsity,
        "achieved_sparsity": report.achieved_sparsity,
        "block_sparsity": dict(report.blocks),
        "projections": {
            kind: {"sparsity": sparsity, "weights": weight_names[kind]} for kind, sparsity in kinds.items()
        },
        "left_out": [
            projection.name
            for block, projection in _projections(decoder)
            if not projection.pruned and block.name in report.blocks and kind_of(block, projection) in kinds
        ],
        "block_lambda": report.block_lambda,
        "row_lambda": report.row_lambda,
        "calibration": report.calibration,
        "config": report.config,
        "versions": report.versions,
    }


def stored_names(model: PreTrainedModel, decoder: Decoder) -> dict[str, list[str]]:
    """How the weights of every kind of projection are called in a checkpoint's files.

    Returns:
        `dict[str, list[str]]`: kind, see [`kind_of`] -> names with `*` for every number. They differ from the module's
            where transformers stores weights otherwise than it holds them: experts one by one, gate and up apart.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, list[str]] = {}
    for block, projection in _projections(decoder):
        kind = kind_of(block, projection)
        if kind not in found and projection.pruned:
            stand_in = torch.empty(projection.owner.shape, dtype=projection.owner.dtype, device="meta")
            stored = revert_weight_conversion(model, {names[id(projection.owner)]: stand_in})
            found[kind] = sorted({with_stars(name) for name in stored})
    return found


def kind_of(block: Block, projection: Projection) -> str:
    """What projections of different blocks, and of different experts, have in common: `mlp.experts.*.down_proj`."""
    return with_stars(projection.name.removeprefix(f"{block.name}."))


def with_stars(name: str) -> str:
    """A dotted name with `*` for every number."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def _projections(decoder: Decoder) -> Iterator[tuple[Block, Projection]]:
    for block in decoder.blocks:
        for projection in block.projections.values():
            yield block, projection


def _sparsity_by_kind(decoder: Decoder, report: PruningReport) -> dict[str, float]:
    """Kind -> share of zeros in all pruned projections of that kind."""
    counts: dict[str, tuple[int, int]] = {}
    for block, projection in _projections(decoder):
        if projection.pruned:
            kind, size = kind_of(block, projection), projection.shape[0] * projection.shape[1]
            zeros, weights = counts.get(kind, (0, 0))
            own = round(report.projections[projection.name]["sparsity"] * size)
            counts[kind] = zeros + own, weights + size
    return {kind: zeros / weights for kind, (zeros, weights) in counts.items()}
