"""The report of a pruning run, and the `sparsity_config` in config.json. Both are made before any weight changes."""

import copy
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from ..blocks.runner import BlockRunner
from ..common.display import display_name
from ..common.torch_state import peak_memory
from ..files.records import versions
from ..model.change import Change, packed_bytes
from ..model.origin import hub_id
from ..model.projections import Block, Decoder, Projection, by_owner, every_projection, kind_of
from ..model.sparsity_config import KEY, VERSION
from ..report import PruningReport
from ..topup import Allocation
from .prepare import PruneContext


@dataclass(frozen=True)
class PruneOutcome:
    """The top-up's allocation and the change of each projection's weight, by name."""

    allocation: Allocation
    changes: dict[str, Change]
    block_forwards: int
    starved_experts: list[str]
    divergence: dict[str, float]


def make_report(context: PruneContext, outcome: PruneOutcome) -> PruningReport:
    """Return the report of a pruning run whose model has still dense weights."""
    decoder, config = context.decoder, context.config
    achieved, blocks, projections = measure_sparsity(context.runner, outcome.changes)
    decisions = outcome.allocation.decisions
    values = config.to_dict() | {"refit_dtype": context.refit_dtype}
    passed = [context.dataset] if isinstance(context.dataset, str | os.PathLike) else []  # other data have no name
    names = [display_name(os.fspath(one)) for one in (config.dataset_names if context.dataset is None else passed)]
    values["dataset"] = names[0] if len(names) == 1 else names or None
    size = packed_size(decoder, lambda p: round(projections[p.name]["sparsity"] * p.numel))
    return PruningReport(
        config=values,
        method=context.methods.title,
        requested_sparsity=config.sparsity,
        achieved_sparsity=achieved,
        blocks=blocks,
        projections=projections,
        block_lambda=decisions.get("block", {}).get("lambda"),
        row_lambda=decisions.get("row", {}).get("lambda"),
        decisions=decisions,
        calibration={} if context.calibration is None else context.calibration.to_dict(),
        seconds=dict(context.clock.seconds),
        block_forwards=outcome.block_forwards,
        starved_experts=outcome.starved_experts,
        divergence=outcome.divergence,
        resumed=context.records.resumed,
        peak_memory=peak_memory(),
        versions=versions(),
        bits_per_weight=size.bits_per_weight,
        gguf_file=getattr(decoder.model, "gguf_file", None),
        dtype=str(context.model.dtype).removeprefix("torch."),
    )


def measure_sparsity(
    runner: BlockRunner, changes: Mapping[str, Change] | None = None
) -> tuple[float, dict[str, float], dict[str, dict[str, float]]]:
    """Return the share of zeros, with `changes` made, in all pruned projections, by block, and by projection and row."""
    changes = changes or {}
    projections: dict[str, dict[str, float]] = {}

    def count(index: int, block: Block) -> int:
        zeros = 0
        for projection in block.pruned:
            change, weight = changes.get(projection.name), projection.weight
            counts = ((weight if change is None else change.applied(weight)) == 0).sum(dim=1).cpu()
            rows = counts.double() / projection.shape[1]
            projections[projection.name] = {
                "sparsity": rows.mean().item(),
                "smallest_row": rows.min().item(),
                "largest_row": rows.max().item(),
            }
            zeros += int(counts.sum())
        return zeros

    with torch.no_grad():
        zeros = runner.for_each_block(count)
    decoder = runner.decoder
    blocks = {b.name: block_zeros / b.numel for b, block_zeros in zip(decoder.blocks, zeros) if b.pruned}
    return sum(zeros) / sum(block.numel for block in decoder.blocks), blocks, projections


def make_sparsity_config(
    decoder: Decoder, report: PruningReport, weight_names: Mapping[str, list[str]]
) -> dict[str, Any]:
    """Return what a pruned model's config keeps of the report; `weight_names` are those of [`stored_names`]."""
    kinds = _projections_by_kind(decoder, report, weight_names)
    return {
        "version": VERSION,
        "quant_method": "neuronal",
        "base_model": hub_id(decoder.model),
        "method": report.method,
        "sparsity": report.requested_sparsity,
        "achieved_sparsity": report.achieved_sparsity,
        "block_sparsity": dict(report.blocks),
        "projections": kinds,
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


def _projections_by_kind(
    decoder: Decoder, report: PruningReport, weight_names: Mapping[str, list[str]]
) -> dict[str, dict[str, Any]]:
    """Return, for each kind of projection, sparsity, size, names and layout of the pruned ones."""
    kinds: dict[str, list[Projection]] = {}
    for block, projection in every_projection(decoder):
        if projection.pruned:
            kinds.setdefault(kind_of(block, projection), []).append(projection)
    entries = {}
    for kind, pruned in kinds.items():
        zeros = sum(round(report.projections[p.name]["sparsity"] * p.numel) for p in pruned)
        numel = sum(p.numel for p in pruned)
        entries[kind] = {"sparsity": zeros / numel, "numel": numel, "weights": weight_names[kind]}
        if pruned[0].transposed:
            entries[kind]["transposed"] = True
    return entries


def record_sparsity(model: PreTrainedModel, sparsity_config: Mapping[str, Any]) -> None:
    """Write a sparsity_config into a copy of the model's config, which a dense model may share."""
    before, config = model.config, copy.copy(model.config)
    setattr(config, KEY, sparsity_config)
    for module in model.modules():  # blocks read how they attend from the model's config
        if module.__dict__.get("config") is before:
            module.config = config


@dataclass(frozen=True)
class PackedSize:
    """Bytes of pruned weights. A weight that is not smaller when packed counts as dense."""

    dense: int
    saved: int  # in the packed format
    weights: int  # number of weights

    @property
    def bits_per_weight(self) -> float:
        """Bits per weight in the packed format: mask and values."""
        return 8 * self.saved / self.weights


def packed_size(decoder: Decoder, zeros: Callable[[Projection], int]) -> PackedSize:
    """Return the size of a decoder's pruned weights, which may be on the meta device. `zeros` counts a projection's."""
    dense = saved = weights = 0
    for projections in by_owner(decoder.projections.values()):
        owner = projections[0].owner  # packed in its own layout
        size = owner.numel() * owner.element_size()
        packed = packed_bytes(owner.shape, owner.numel() - sum(map(zeros, projections)), owner.element_size())
        dense, saved, weights = dense + size, saved + min(size, packed), weights + owner.numel()
    return PackedSize(dense, saved, weights)
