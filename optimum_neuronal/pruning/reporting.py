"""The report of a pruning run, and the `sparsity_config` in config.json. Both are made before any weight changes."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..common.display import display_name
from ..common.torch_state import peak_memory
from ..files.records import versions
from ..model.change import Change, packed_bytes
from ..model.origin import hub_id
from ..model.projections import Decoder, Projection, by_owner
from ..model.sparsity import Sparsity, describe_sparsity, measure_sparsity
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
    achieved, blocks, projections = measure_sparsity(decoder, outcome.changes)
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
        resumed=context.evaluator.records.resumed,
        peak_memory=peak_memory(),
        versions=versions(),
        bits_per_weight=size.bits_per_weight,
        gguf_file=getattr(decoder.model, "gguf_file", None),
        dtype=str(context.model.dtype).removeprefix("torch."),
    )


def make_sparsity_config(decoder: Decoder, report: PruningReport) -> dict[str, Any]:
    """Return what a pruned model's config keeps of the report."""
    return describe_sparsity(
        decoder,
        Sparsity(report.achieved_sparsity, report.blocks, report.projections),
        base_model=hub_id(decoder.model),
        method=report.method,
        sparsity=report.requested_sparsity,
        block_lambda=report.block_lambda,
        row_lambda=report.row_lambda,
        calibration=report.calibration,
        config=report.config,
        versions=report.versions,
    )


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
