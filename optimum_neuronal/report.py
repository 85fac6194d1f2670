"""Report of a prune: its decisions and costs, as JSON and as a table."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .common.display import format_table
from .files.atomic import write_atomically


REPORT_NAME = "neuronal_report.json"
VERSION = 1


@dataclass(repr=False)
class PruningReport:
    """Report of a prune. `print(report)` shows it as a table. Saved with a model as `neuronal_report.json`.

    Args:
        config (`dict`): the `NeuronALConfig`.
        requested_sparsity (`float`): requested share of zeros, in [0, 1); 0 if weights are quantized.
        achieved_sparsity (`float`): share of zeros in all pruned projections, counted in the weights.
        blocks (`dict`): block name -> share of zeros in its pruned projections.
        projections (`dict`):
            Projection name -> shares of zeros `sparsity`, `smallest_row` and `largest_row`; and `bits` of quantized weights.
        block_lambda, row_lambda (`float`, *optional*): NeuronAL's choices.
        decisions (`dict`): the top-up's candidates, each with its error; or what the projections' bits follow from.
        calibration (`dict`): source, number and length of the sequences, seed; empty if none was needed.
        seconds (`dict`): wall-clock seconds by phase.
        block_forwards (`int`): number of forward passes of a block on one sequence.
        starved_experts (`list[str]`): projections of experts that received fewer than `min_expert_tokens` tokens.
        peak_memory (`dict`): bytes by device.
        versions (`dict`): of this package, transformers, torch and Python.
        evaluation (`dict`): dataset -> perplexity, `dense` and `pruned`, and `window`, its tokens; you may fill it in. The model card shows it.
        bits_per_weight (`float`, *optional*): of the pruned projections in the packed format, masks or scales included.
        head_roundings (`dict`):
            Name in the files -> `error`: squared error of rounding token embeddings and head to 8 bits, relative to
            the squared weights.
        dtype (`str`, *optional*): of the weights during the prune, such as `"float32"`; they may be saved in another.
        gguf_file (`str`, *optional*): GGUF file that the dense model was read from. Its weights had been quantized before.
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
    bits_per_weight: float | None = None
    head_roundings: dict[str, dict[str, float]] = field(default_factory=dict)
    dtype: str | None = None
    gguf_file: str | None = None
    version: int = VERSION

    @property
    def lost_most(self) -> bool:
        """True if a perplexity more than doubled."""
        return any(own.get("pruned", 0) > 2 * own["dense"] for own in self.evaluation.values() if "dense" in own)

    def to_dict(self) -> dict[str, Any]:
        """Return the whole report, JSON-serializable."""
        return asdict(self)

    def save(self, directory: str | Path) -> Path:
        """Write `neuronal_report.json` and return its path."""
        path = Path(directory) / REPORT_NAME
        write_atomically(path, (json.dumps(self.to_dict(), indent=2) + "\n").encode())
        return path

    def __repr__(self) -> str:
        return format_table(["", "pruned model"], list(self._rows()))

    def _rows(self) -> Iterator[list[str]]:
        if self.config.get("bits_per_weight") is None:
            yield ["sparsity", f"{self.achieved_sparsity:.4%} (requested: {self.requested_sparsity:.2%})"]
            yield ["by block", f"{min(self.blocks.values()):.2%} to {max(self.blocks.values()):.2%}"]
        else:
            yield from self._rate_rows()
        if self.gguf_file:
            yield ["dense model", f"{self.gguf_file}, whose weights had been quantized before"]
        yield ["method", method_text(self.config)]
        if self.head_roundings:
            error, name = max((own["error"], name) for name, own in self.head_roundings.items())
            text = f"{self.config['embedding_bits']} bits; squared error of rounding at most {error:.4%} ({name})"
            yield ["embeddings and head", text]
        for step, chosen in (("block", self.block_lambda), ("row", self.row_lambda)):
            if chosen is not None:
                yield [f"lambda of the {step} step", f"{chosen:g}"]
        if self.calibration:
            yield ["calibration", "{num_samples} x {seq_length} tokens of {source}".format(**self.calibration)]
        if self.starved_experts:
            count, least = len(self.starved_experts), self.config["min_expert_tokens"]
            yield ["starved experts", f"{count} projections of experts that received fewer than {least} tokens"]
        for dataset, found in self.evaluation.items():
            values = ", ".join(f"{found[when]:.2f} ({when})" for when in ("dense", "pruned") if when in found)
            tokens = f", windows of {found['window']} tokens" if "window" in found else ""
            yield [f"perplexity, {dataset}{tokens}", values]
        yield ["seconds", ", ".join(f"{phase} {value:.1f}" for phase, value in self.seconds.items())]
        yield ["peak memory", ", ".join(f"{name} {size / 1e9:.2f} GB" for name, size in self.peak_memory.items())]

    def _rate_rows(self) -> Iterator[list[str]]:
        yield ["bits per weight", f"{self.bits_per_weight:.3f} (requested: {self.config['bits_per_weight']:g})"]
        counts = Counter(own["bits"] for own in self.projections.values())
        text = ", ".join(f"{bits:g} in {count}" for bits, count in sorted(counts.items()))
        yield ["bits of codes", f"{text} projections"]


def method_text(config: Mapping[str, Any]) -> str:
    """Return how fields of a `NeuronALConfig` prune a model, in a few words."""
    if config.get("bits_per_weight") is None:
        epochs = config.get("refit_epochs")
        return f"{config['saliency']} + {config['topup']}" + (f", refit of {epochs} epochs" if epochs else "")
    return "quantized, " + ("uniform rates" if config["topup"] == "uniform" else "rates by divergence")
