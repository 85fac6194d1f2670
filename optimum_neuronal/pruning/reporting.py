"""The report of a prune, made before a weight is changed: what may fail fails while the model is as it was."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..blocks.offload import BlockLoader
from ..checkpoint.sparsity_config import KEY
from ..common.machine import peak_memory
from ..model.packed_size import PackedSize, packed_size
from ..model.projections import Decoder
from ..packed.change import Change
from ..report import PruningReport
from ..rotation.rotated_weights import find_rotated
from ..saliency.plan import RatePlan, row_sparsity
from ..topup.rates import Rates
from .context import PruneContext, PruneOutcome, versions


def make_report(
    context: PruneContext,
    outcome: PruneOutcome,
    head_roundings: Mapping[str, Mapping[str, float]] | None = None,
    rotation: Mapping[str, Any] | None = None,
) -> PruningReport:
    """Return the report of a prune.

    Args:
        context ([`PruneContext`]): of the model, whose weights are still the dense ones.
        outcome ([`PruneOutcome`]): of the prune.
        head_roundings (`Mapping`, *optional*): from [`head_errors`].
        rotation (`Mapping`, *optional*): from [`rotated`].
    """
    decoder, config = context.decoder, context.config
    achieved, blocks, projections = measure_sparsity(decoder, outcome.changes)
    plan = outcome.allocation.plan
    bits = plan.bits if isinstance(plan, RatePlan) else None
    values = config.to_dict()
    if config.dataset is not None:
        values["dataset"] = without_folders(config.dataset)
    decisions = outcome.allocation.decisions
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
        head_roundings=dict(head_roundings or {}),
        rotation=dict(rotation or {}),
    )


class PrunedModel(NamedTuple):
    """A model that was pruned: its report, its size, its config's `sparsity_config`, and its own tokenizer."""

    report: PruningReport
    size: PackedSize
    sparsity_config: Mapping[str, Any]
    tokenizer: PreTrainedTokenizerBase | None


class PrunedModels:
    """The models that a pruner has pruned, as long as they exist."""

    def __init__(self) -> None:
        self._found: WeakKeyDictionary[PreTrainedModel, PrunedModel] = WeakKeyDictionary()
        self._pruned_any = False

    def add(
        self,
        model: PreTrainedModel,
        report: PruningReport,
        size: PackedSize,
        tokenizer: PreTrainedTokenizerBase | None,
    ) -> None:
        """Add a model, or replace its entry."""
        self._pruned_any = True
        self._found[model] = PrunedModel(report, size, getattr(model.config, KEY), tokenizer)

    def find(self, model: nn.Module) -> PrunedModel:
        """Return the entry of a model, or of the model that it is a copy of.

        Raises:
            `ValueError`: it was not pruned by this pruner, or was pruned otherwise since.
            `TypeError`: it is no model.
        """
        if not self._pruned_any:
            raise ValueError("This pruner has pruned nothing yet: call prune(model) first.")
        if not isinstance(model, nn.Module):
            raise TypeError(f"Expected the model that prune(model) returned, got {type(model).__name__}.")
        sparsity_config, own = getattr(getattr(model, "config", None), KEY, None), self._found.get(model)
        for pruned in reversed(list(self._found.values())) if own is None else [own]:
            if pruned.sparsity_config == sparsity_config:
                return pruned
        raise ValueError(
            "The model is not as this pruner has left it, so that its report and model card would be wrong: save what "
            "prune(model) returned; or use model.save_pretrained(directory), which writes the weights alone."
        )


def expected_size(context: PruneContext, unties: bool, head: bool = True) -> PackedSize:
    """Return the size that the pruned weights, and embeddings and head of few bits, will have.

    Args:
        context ([`PruneContext`]): of a model whose weights need not be loaded.
        unties (`bool`): see [`packed_size`].
        head (`bool`): False to leave out embeddings and head.
    """
    config, topup, decoder = context.config, context.methods.topup, context.decoder
    bits = topup.even(decoder).bits if isinstance(topup, Rates) else None
    head_bits = config.embedding_bits if head else None
    return packed_size(decoder, lambda p: int((config.sparsity or 0) * p.numel), bits, head_bits, unties)


def untied_bytes(context: PruneContext) -> int:
    """Return the bytes of a head that a rotation will untie from the embeddings, 0 if it unties none."""
    rotation = context.methods.rotation
    return 0 if rotation is None else find_rotated(context.decoder, rotation.untie).untied_bytes


def pruned_size(decoder: Decoder, report: PruningReport) -> PackedSize:
    """Return the size of the pruned weights, embeddings and head of a report."""
    found = report.projections
    bits = {name: int(own["bits"]) for name, own in found.items() if "bits" in own} or None
    return packed_size(
        decoder, lambda p: round(found[p.name]["sparsity"] * p.numel), bits, report.config["embedding_bits"]
    )


def without_folders(dataset: str) -> str:
    """Return the name of a dataset for a report, which is published, without folders of this machine.

    Args:
        dataset (`str`): a name, `ID:SPLIT:COLUMN`, `FILE` or `FILE:COLUMN`.
    """
    # Whatever it is: os.path.exists takes names that are too long or lie where nothing may be read for no paths.
    paths = [os.path.expanduser(path) for path in (dataset, dataset.rpartition(":")[0])]  # FILE or FILE:COLUMN
    return Path(dataset).name if any(os.path.exists(path) or os.path.isabs(path) for path in paths) else dataset


def measure_sparsity(
    decoder: Decoder, changes: Mapping[str, Change] | None = None
) -> tuple[float, dict[str, float], dict[str, dict[str, float]]]:
    """Count the zeros in the weights.

    Args:
        decoder ([`Decoder`]): the model's blocks and projections.
        changes (`Mapping[str, Change]`, *optional*):
            Projection name -> what will become of its weight: zeros are counted as if it had. One sparse weight exists
            at a time, and none is changed.

    Returns:
        `tuple`: share of zeros in all pruned projections; by block; and by projection with its extreme rows.
    """
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
                out_features, in_features = projection.shape
                projections[projection.name] = {
                    "sparsity": rows.mean().item(),
                    "smallest_row": rows.min().item(),
                    "largest_row": rows.max().item(),
                }
                block_zeros += round((rows * in_features).sum().item())
                block_weights += out_features * in_features
        if block_weights:
            blocks[block.name] = block_zeros / block_weights
        zeros, weights = zeros + block_zeros, weights + block_weights
    return zeros / weights, blocks, projections
