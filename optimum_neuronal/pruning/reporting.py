"""The report of a prune, told before a weight is changed: what may fail fails while the model is as it was."""

import os
import platform
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch
import transformers

from ..checkpoint.packed_size import packed_size
from ..data.calibration import CalibrationSet
from ..model.projections import Decoder
from ..report import PruningReport
from ..system.peak_memory import peak_memory
from ..version import __version__
from .finding import PruneOutcome
from .sparsity_found import measure_sparsity


def make_report(
    decoder: Decoder,
    calibration: CalibrationSet | None,
    outcome: PruneOutcome,
    seconds: Mapping[str, float],
) -> PruningReport:
    """What was done.

    Args:
        decoder ([`Decoder`]): of the model, whose weights are still the dense ones.
        calibration ([`CalibrationSet`], *optional*): with which sequences; None if none were needed.
        outcome ([`PruneOutcome`]): what was found.
        seconds (`Mapping[str, float]`): phase -> seconds of wall time.
    """
    config = outcome.config
    achieved, blocks, projections = measure_sparsity(decoder, outcome.changes)
    values = config.to_dict()
    if config.dataset is not None:
        values["dataset"] = without_folders(config.dataset)
    decisions = outcome.allocation.decisions
    return PruningReport(
        config=values,
        requested_sparsity=config.sparsity,
        achieved_sparsity=achieved,
        blocks=blocks,
        projections=projections,
        block_lambda=decisions.get("block", {}).get("lambda"),
        row_lambda=decisions.get("row", {}).get("lambda"),
        decisions=decisions,
        calibration={} if calibration is None else calibration.to_dict(),
        seconds=dict(seconds),
        block_forwards=outcome.block_forwards,
        starved_experts=outcome.starved_experts,
        peak_memory=peak_memory(),
        versions=versions(),
        bits_per_weight=_bits_per_weight(decoder, projections, config.value_bits),
        roundings={name: asdict(rounding) for name, rounding in outcome.roundings.items()},
    )


def _bits_per_weight(
    decoder: Decoder, projections: Mapping[str, Mapping[str, float]], value_bits: int | None
) -> float:
    zeros = {name: found["sparsity"] for name, found in projections.items()}
    return packed_size(decoder, lambda p: round(zeros[p.name] * p.numel), value_bits).bits_per_weight


def without_folders(dataset: str) -> str:
    """The name of a dataset for a report, which is published: no folders of this machine.

    Args:
        dataset (`str`): a name, `ID:SPLIT:COLUMN`, `FILE` or `FILE:COLUMN`.
    """
    # Whatever it is: os.path.isfile takes names that are too long or lie where nothing may be read for no files.
    paths = [os.path.expanduser(path) for path in (dataset, dataset.rpartition(":")[0])]  # FILE or FILE:COLUMN
    return Path(dataset).name if any(os.path.isfile(path) or os.path.isabs(path) for path in paths) else dataset


def versions() -> dict[str, str]:
    """Package -> version: of this package and of what decides its results."""
    return {
        "optimum_neuronal": __version__,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
