"""The report of a prune, made before any weight changes: what may fail fails while the model is as it was."""

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from .. import __version__
from ..blocks.offload import BlockLoader
from ..common.machine import peak_memory
from ..model.packed_size import PackedSize, packed_size
from ..model.projections import Decoder
from ..packed.change import Change
from ..report import PruningReport
from ..saliency.plan import RatePlan, row_sparsity
from ..topup import Allocation
from ..topup.rates import Rates
from .context import PruneContext


@dataclass(frozen=True)
class PruneOutcome:
    """The top-up's allocation and the change of each projection's weight, by name."""

    allocation: Allocation
    changes: dict[str, Change]
    block_forwards: int
    starved_experts: list[str]


def make_report(
    context: PruneContext,
    outcome: PruneOutcome,
    head_roundings: Mapping[str, dict[str, float]],
    rotation: Mapping[str, Any],
) -> PruningReport:
    """Return the report of a prune of a model whose weights are still dense."""
    decoder, config = context.decoder, context.config
    achieved, blocks, projections = measure_sparsity(decoder, outcome.changes)
    plan, decisions = outcome.allocation.plan, outcome.allocation.decisions
    bits = plan.amounts if isinstance(plan, RatePlan) else None
    values = config.to_dict()
    if config.dataset is not None:
        values["dataset"] = without_folders(config.dataset)
    size = packed_size(decoder, lambda p: round(projections[p.name]["sparsity"] * p.numel), bits)
    for name, own in (bits or {}).items():
        projections[name] |= {"bits": own}
    return PruningReport(
        config=values,
        requested_sparsity=config.sparsity or 0.0,
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
        peak_memory=peak_memory(),
        versions=versions(),
        bits_per_weight=size.bits_per_weight,
        head_roundings=dict(head_roundings),
        rotation=dict(rotation),
    )


def versions() -> dict[str, str]:
    """Return the versions of this package and of the libraries that decide its results."""
    return {
        "optimum_neuronal": __version__,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def expected_size(context: PruneContext, unties: bool, head: bool = True) -> PackedSize:
    """Return the packed size before the prune. Weights need not be loaded. `head=False` leaves out embeddings and head."""
    config, topup, decoder = context.config, context.methods.topup, context.decoder
    bits = topup.even(decoder).amounts if isinstance(topup, Rates) else None
    head_bits = config.embedding_bits if head else None
    return packed_size(decoder, lambda p: int((config.sparsity or 0) * p.numel), bits, head_bits, unties)


def without_folders(dataset: str) -> str:
    """Return the name of a dataset for a report, which is published, without folders of this machine."""
    # os.path.exists returns False for names that are too long and for paths that cannot be read.
    paths = [os.path.expanduser(path) for path in (dataset, dataset.rpartition(":")[0])]  # FILE or FILE:COLUMN
    return Path(dataset).name if any(os.path.exists(path) or os.path.isabs(path) for path in paths) else dataset


def measure_sparsity(
    decoder: Decoder, changes: Mapping[str, Change] | None = None
) -> tuple[float, dict[str, float], dict[str, dict[str, float]]]:
    """Return the share of zeros, with `changes` made, in all pruned projections, by block, and by projection and row."""
    projections: dict[str, dict[str, float]] = {}
    blocks: dict[str, float] = {}
    zeros = weights = 0
    loader, changes = BlockLoader(decoder.blocks), changes or {}
    for index in range(len(decoder.blocks)):
        block_zeros = block_weights = 0
        with loader.loaded(index) as block, torch.no_grad():
            for projection in block.pruned:
                change, weight = changes.get(projection.name), projection.weight
                rows = row_sparsity(weight if change is None else change.applied(weight)).cpu()
                projections[projection.name] = {
                    "sparsity": rows.mean().item(),
                    "smallest_row": rows.min().item(),
                    "largest_row": rows.max().item(),
                }
                block_zeros += round((rows * projection.shape[1]).sum().item())
                block_weights += projection.numel
        if block_weights:
            blocks[block.name] = block_zeros / block_weights
        zeros, weights = zeros + block_zeros, weights + block_weights
    return zeros / weights, blocks, projections
