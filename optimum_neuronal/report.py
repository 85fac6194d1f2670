"""What was decided and what it cost: the report of a prune, as JSON and as a table."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .display import format_html, format_table


REPORT_NAME = "neuronal_report.json"
VERSION = 1


@dataclass(repr=False)
class PruningReport:
    """What a prune did; `print(report)` shows it as a table, and so does a notebook.

    Written beside a saved model as `neuronal_report.json`.

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
        peak_memory (`dict`): bytes by device, from `system.memory`.
        versions (`dict`): of this package, transformers, torch and Python.
        evaluation (`dict`):
            Perplexities of the model on test texts, if they were measured: dataset -> `dense` and `pruned`, before and
            after. May be filled in by hand; the model card shows them.
        roundings (`dict`):
            Projection name -> `error`, the squared error of rounding its kept values to few bits as a share of their
            squares, and `clipped`, how many were beyond what their group's scale holds; empty if none were rounded, or
            where the saliency updates weights, so that they make up for each other.
        bits_per_weight (`float`, *optional*):
            What a weight of the pruned projections takes in the packed format, masks and scales counted; of reports of
            earlier releases None.
        head_roundings (`dict`):
            Name in the files -> `error`, the same of token embeddings and head, if they were rounded to 8 bits.
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
    roundings: dict[str, dict[str, float]] = field(default_factory=dict)
    bits_per_weight: float | None = None
    head_roundings: dict[str, dict[str, float]] = field(default_factory=dict)
    version: int = VERSION

    def to_dict(self) -> dict[str, Any]:
        """Return the whole report, in JSON types."""
        return asdict(self)

    def save(self, directory: str | Path, files: Iterable[str] = ()) -> Path:
        """Write `neuronal_report.json` into an existing directory and return its path.

        Args:
            directory (`str` or `Path`): where to.
            files (`Iterable[str]`): names of what was saved together with it, which a later save may replace.
        """
        path = Path(directory) / REPORT_NAME
        content = {**self.to_dict(), "files": sorted({*files, REPORT_NAME})}
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        return path

    def __repr__(self) -> str:
        return f"PruningReport({self.config['saliency']} + {self.config['topup']}, {self.achieved_sparsity:.2%} zeros)"

    def __str__(self) -> str:
        return format_table(["", "pruned model"], self._rows())

    def _repr_html_(self) -> str:
        return format_html(["", "pruned model"], self._rows())

    def _values(self) -> str:
        """To how many bits values were rounded, and where that lost most."""
        told = f"{self.config['value_bits']} bits"
        if not self.roundings:
            return told
        worst = max(self.roundings, key=lambda name: self.roundings[name]["error"])
        clipped = sum(rounding["clipped"] for rounding in self.roundings.values())
        return (
            f"{told}; squared error of rounding at most {self.roundings[worst]['error']:.2%} ({worst}), {clipped:,} outliers "
            "clipped"
        )

    def _bits(self) -> str:
        """How many there are, and what else would have fitted into a budget."""
        told = f"{self.bits_per_weight:.3f}"
        divided = self.decisions.get("bits")
        if divided is None:
            return told
        tried = ", ".join("{value_bits} at {sparsity:.2%}".format(**pair) for pair in divided["pairs"])
        return f"{told} (at most {divided['budget']:g}; chosen of values with so many bits: {tried})"

    def _head(self) -> str:
        """To how many bits embeddings and head were rounded, and where that lost most."""
        worst = max(self.head_roundings, key=lambda name: self.head_roundings[name]["error"])
        error = self.head_roundings[worst]["error"]
        return f"{self.config['embedding_bits']} bits; squared error of rounding at most {error:.4%} ({worst})"

    def _rows(self) -> list[list[str]]:
        rows = [
            ["sparsity", f"{self.achieved_sparsity:.4%} (asked for {self.requested_sparsity:.2%})"],
            ["by block", f"{min(self.blocks.values()):.2%} to {max(self.blocks.values()):.2%}"],
            ["method", f"{self.config['saliency']} + {self.config['topup']}"],
        ]
        if self.config.get("value_bits") is not None:
            rows.append(["values", self._values()])
        if self.config.get("value_bits") is not None and self.bits_per_weight is not None:
            rows.append(["bits a weight", self._bits()])
        if self.head_roundings:
            rows.append(["embeddings and head", self._head()])
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
        return rows
