"""What was decided and what it cost: the report of a prune, as JSON and as a table."""

import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from .decoder.projections import Decoder
from .engine.offload import BlockLoader
from .sparsity.cuts import row_sparsity


REPORT_NAME = "neuronal_report.json"
VERSION = 1


@dataclass
class PruningReport:
    """What a prune did. Written beside a saved model as `neuronal_report.json`.

    Args:
        config (`dict`): the `NeuronALConfig`.
        requested_sparsity (`float`): share of zeros asked for, in [0, 1).
        achieved_sparsity (`float`): share of zeros in all pruned projections, counted in the weights.
        blocks (`dict`): block name -> share of zeros in its pruned projections.
        projections (`dict`): projection name -> `sparsity`, `smallest_row` and `largest_row`, shares of zeros.
        block_lambda, row_lambda (`float`, *optional*): what NeuronAL chose.
        decisions (`dict`): what the top-up tried: every candidate with its error.
        calibration (`dict`): source, number and length of the sequences, seed; empty if none was needed.
        seconds (`dict`): wall-clock seconds by phase.
        block_forwards (`int`): how often a block was run on one sequence.
        starved_experts (`list[str]`):
            Projections of experts that received fewer than `min_expert_tokens` calibration tokens.
        peak_memory (`dict`): bytes by device, see [`peak_memory`].
        versions (`dict`): of this package, transformers, torch and Python.
        evaluation (`dict`):
            Perplexities of the model on test texts, if they were measured: dataset -> `dense` and `pruned`, before and
            after. May be filled in by hand; the model card shows them.
        version (`int`): of this format.
    """

    config: dict[str, Any]
    requested_sparsity: float
    achieved_sparsity: float
    blocks: dict[str, float]
    projections: dict[str, dict[str, float]]
    block_lambda: float | None
    row_lambda: float | None
    decisions: dict[str, Any]
    calibration: dict[str, Any]
    seconds: dict[str, float]
    block_forwards: int
    starved_experts: list[str]
    peak_memory: dict[str, int]
    versions: dict[str, str]
    evaluation: dict[str, dict[str, float]] = field(default_factory=dict)
    version: int = VERSION

    def to_dict(self) -> dict[str, Any]:
        """All of it, JSON-serialisable."""
        return asdict(self)

    def save(self, directory: str | Path) -> Path:
        """Writes `neuronal_report.json` into an existing directory and returns its path."""
        path = Path(directory) / REPORT_NAME
        path.write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")
        return path

    def __str__(self) -> str:
        """A table for the terminal."""
        rows = [
            ["sparsity", f"{self.achieved_sparsity:.4%} (asked for {self.requested_sparsity:.2%})"],
            ["by block", f"{min(self.blocks.values()):.2%} to {max(self.blocks.values()):.2%}"],
            ["method", f"{self.config['saliency']} + {self.config['topup']}"],
        ]
        if self.block_lambda is not None:
            rows.append(["lambda of the block step", f"{self.block_lambda:g}"])
        if self.row_lambda is not None:
            rows.append(["lambda of the row step", f"{self.row_lambda:g}"])
        if self.calibration:
            rows.append(["calibration", "{num_samples} x {seq_length} tokens of {source}".format(**self.calibration)])
        if self.starved_experts:
            count, least = len(self.starved_experts), self.config["min_expert_tokens"]
            rows.append(["starved experts", f"{count} projections of experts that received fewer than {least} tokens"])
        for dataset, found in self.evaluation.items():
            values = ", ".join(f"{found[when]:.2f} ({when})" for when in ("dense", "pruned") if when in found)
            rows.append([f"perplexity, {dataset}", values])
        rows.append(["seconds", ", ".join(f"{phase} {value:.1f}" for phase, value in self.seconds.items())])
        rows.append(
            ["peak memory", ", ".join(f"{name} {size / 1e9:.2f} GB" for name, size in self.peak_memory.items())]
        )
        return format_table(["", "pruned model"], rows)


def measure_sparsity(
    decoder: Decoder, loader: BlockLoader | None = None
) -> tuple[float, dict[str, float], dict[str, dict[str, float]]]:
    """Counts the zeros in the weights.

    Args:
        decoder ([`Decoder`]): the model's blocks and projections.
        loader ([`BlockLoader`], *optional*): brings offloaded weights.

    Returns:
        `tuple`: share of zeros in all pruned projections; by block; and by projection with its extreme rows.
    """
    projections: dict[str, dict[str, float]] = {}
    blocks: dict[str, float] = {}
    zeros = weights = 0
    loader = loader or BlockLoader(decoder.blocks)
    for index in range(len(decoder.blocks)):
        block_zeros = block_weights = 0
        with loader.loaded(index) as block:
            for projection in block.pruned:
                rows = row_sparsity(projection.weight).cpu()
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


def reset_peak_memory() -> None:
    """Begins anew with what [`peak_memory`] tells, where the system allows it: on accelerators and on Linux."""
    if torch.accelerator.is_available():
        torch.accelerator.reset_peak_memory_stats()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_memory() -> dict[str, int]:
    """Largest memory so far, in bytes: of this process (`"host"`) and of every accelerator that it uses."""
    peaks = {}
    with suppress(ImportError):  # Windows
        peaks["host"] = _largest_resident_size()
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator().type
        for index in range(torch.accelerator.device_count()):
            if size := torch.accelerator.max_memory_allocated(index):
                peaks[f"{kind}:{index}"] = size
    return peaks


def _largest_resident_size() -> int:
    import resource

    with suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def format_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Lines of a table with aligned columns: numbers to the right, text to the left."""
    cells = [[str(cell) for cell in row] for row in [header, *rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]

    def line(row: Sequence[str]) -> str:
        padded = [cell.rjust(width) if _is_number(cell) else cell.ljust(width) for cell, width in zip(row, widths)]
        return "  ".join(padded).rstrip()

    return "\n".join([line(cells[0]), "  ".join("-" * width for width in widths), *map(line, cells[1:])])


def _is_number(cell: str) -> bool:
    return bool(cell) and cell.strip("%").replace(".", "").replace(",", "").replace("-", "").isdigit()
