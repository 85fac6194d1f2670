"""The report of a prune, told from the weights as they are now, sparse."""

import platform
from collections.abc import Mapping
from pathlib import Path

import torch
import transformers

from ..config import NeuronALConfig
from ..data.calibration import CalibrationSet
from ..decoder.projections import Decoder
from ..report import PruningReport
from ..runtime.peak_memory import peak_memory
from ..runtime.version import __version__
from .finding import PruneOutcome
from .sparsity_found import measure_sparsity


def make_report(
    decoder: Decoder,
    config: NeuronALConfig,
    calibration: CalibrationSet | None,
    outcome: PruneOutcome,
    seconds: Mapping[str, float],
) -> PruningReport:
    """What was done.

    Args:
        decoder ([`Decoder`]): of the model, whose weights are the sparse ones now.
        config ([`NeuronALConfig`]): how it was pruned.
        calibration ([`CalibrationSet`], *optional*): with which sequences; None if none were needed.
        outcome ([`PruneOutcome`]): what was found.
        seconds (`Mapping[str, float]`): phase -> seconds of wall time.
    """
    achieved, blocks, projections = measure_sparsity(decoder)
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
    )


def without_folders(dataset: str) -> str:
    """The name of a dataset for a report, which is published: no folders of this machine.

    Args:
        dataset (`str`): a name, `ID:SPLIT:COLUMN`, `FILE` or `FILE:COLUMN`.
    """
    is_file = Path(dataset).is_file() or Path(dataset.rpartition(":")[0]).is_file()  # FILE or FILE:COLUMN
    return Path(dataset).name if is_file else dataset


def versions() -> dict[str, str]:
    """Package -> version: of this package and of what decides its results."""
    return {
        "optimum_neuronal": __version__,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
