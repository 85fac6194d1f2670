"""Report of a pruning run: its decisions and costs, as JSON and as a table."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .common.display import format_duration, format_table
from .files.output import write_atomically


REPORT_NAME = "neuronal_report.json"
VERSION = 1


@dataclass(repr=False)
class PruningReport:
    """Report of a pruning run. `print(report)` shows it as a table. Saved with a model as `neuronal_report.json`.

    Args:
        config (`dict`): the `NeuronALConfig`.
        method (`str`): the methods with their variants and steps: `"wanda + neuronal, authors, block and row steps"`.
        requested_sparsity (`float`): requested share of zeros, in [0, 1).
        achieved_sparsity (`float`): share of zeros in all pruned projections, counted in the weights.
        blocks (`dict`): block name -> share of zeros in its pruned projections.
        projections (`dict`):
            Projection name -> shares of zeros: `sparsity`, `smallest_row` and `largest_row`.
        block_lambda, row_lambda (`float`, *optional*): NeuronAL's choices.
        decisions (`dict`): the top-up's candidates, each with its error.
        calibration (`dict`): source, number and length of the sequences, seed; empty if none was needed.
        seconds (`dict`): wall-clock seconds by phase.
        block_forwards (`int`): number of forward passes of a block on one sequence.
        resumed (`bool`): True if an earlier run was interrupted; seconds and forwards then cover the last one only.
        starved_experts (`list[str]`): projections of experts that received fewer than `min_expert_tokens` tokens.
        peak_memory (`dict`): bytes by device.
        versions (`dict`): of this package, transformers, torch and Python.
        evaluation (`dict`):
            Dataset -> perplexities, `dense` and `pruned`; `windows`, the number of test windows; `window`, the tokens in
            each; and `bos`, True if all begin with the BOS token. The model card shows them. You may fill it in.
        answers (`dict`): of [`Answers`]: how closely the model predicts the dense model's answers; empty if not measured.
        divergence (`dict`):
            KL divergence from the dense model in nats per token on held-out calibration text: `pruned`, and, for methods that
            do more, `by_score`: by the saliency's score alone, with the same sparsity everywhere.
        bits_per_weight (`float`, *optional*): of the pruned projections in the packed format, masks included.
        dtype (`str`, *optional*): of the weights while pruning, such as `"float32"`; they may be saved in another.
        gguf_file (`str`, *optional*): GGUF file that the dense model was read from. Its weights had been quantized before.
        training (`list[dict]`):
            Fine-tunes after pruning, the first one first: the `FinetuneConfig`, `teacher`, `source` of the text and its
            `sha256`, `tokens` in all and of each dataset, `steps` and the `best_step`, `learning_rate`, what was `frozen`,
            `seconds`, and whether it was `resumed`. Perplexities `before` and `after`: on the `held_out` text, and by
            dataset in `evaluation`; `answers` likewise.
        version (`int`): of this format.
    """

    config: dict[str, Any]
    method: str
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
    divergence: dict[str, float] = field(default_factory=dict)
    answers: dict[str, Any] = field(default_factory=dict)
    resumed: bool = False
    bits_per_weight: float | None = None
    dtype: str | None = None
    gguf_file: str | None = None
    training: list[dict[str, Any]] = field(default_factory=list)
    version: int = VERSION

    @property
    def lost_most(self) -> bool:
        """True if a perplexity more than doubled."""
        measured = [values for values in self.evaluation.values() if {"dense", "pruned"} <= values.keys()]
        return any(values["pruned"] > 2 * values["dense"] for values in measured)

    def to_dict(self) -> dict[str, Any]:
        """Return the whole report, JSON-serializable."""
        return asdict(self)

    def save(self, directory: str | Path) -> Path:
        """Write a new `neuronal_report.json` and return its path."""
        path = Path(directory) / REPORT_NAME
        write_atomically(path, (json.dumps(self.to_dict(), indent=2) + "\n").encode(), is_new=True)
        return path

    @classmethod
    def load(cls, directory: str | Path) -> "PruningReport | None":
        """Return the report that was saved with a model, or None if it is missing or cannot be read."""
        try:
            values = json.loads((Path(directory) / REPORT_NAME).read_text(encoding="utf-8"))
            return cls(**values) if values["version"] == VERSION else None
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return None

    def __repr__(self) -> str:
        return format_table(["", "pruned model"], [*self.rows()])

    def rows(self) -> Iterator[list[str]]:
        """Yield the rows of the table: what it is, and its value in words."""
        yield ["sparsity", f"{self.achieved_sparsity:.4%} (requested: {self.requested_sparsity:.2%})"]
        yield ["by block", f"{min(self.blocks.values()):.2%} to {max(self.blocks.values()):.2%}"]
        if self.gguf_file:
            yield ["dense model", f"{self.gguf_file}, whose weights had been quantized before"]
        yield ["method", self.method]
        if "note" in self.decisions:
            yield ["note", self.decisions["note"]]
        for step, chosen in (("block", self.block_lambda), ("row", self.row_lambda)):
            if chosen is not None:
                yield [f"lambda of the {step} step", f"{chosen:g}"]
        if self.calibration:
            yield ["calibration", calibration_text(self.calibration)]
        if self.starved_experts:
            count, least = len(self.starved_experts), self.config["min_expert_tokens"]
            yield ["starved experts", f"{count} projections of experts that received fewer than {least} tokens"]
        for dataset, values in self.evaluation.items():
            shown = ", ".join(f"{values[when]:.2f} ({when})" for when in ("dense", "pruned") if when in values)
            tokens = f", {window_text(values)}" if "window" in values else ""
            yield [f"perplexity, {dataset}{tokens}", shown]
        if self.answers:
            yield ["dense model's answers", answers_text(self.answers)]
        if self.divergence:
            shown = ", ".join(f"{value:.3f} ({name.replace('_', ' ')})" for name, value in self.divergence.items())
            yield ["KL divergence, held-out calibration text", shown]
        seconds = ", ".join(f"{phase} {value:.1f}" for phase, value in self.seconds.items())
        yield ["seconds, resumed" if self.resumed else "seconds", seconds]
        yield ["peak memory", ", ".join(f"{name} {size / 1e9:.2f} GB" for name, size in self.peak_memory.items())]
        for run in self.training:
            took = format_duration(run["seconds"]) + (" since it was resumed" if run["resumed"] else "")
            yield ["fine-tuned", f"{training_text(run)}, {took}"]
            yield ["perplexity, held-out text", before_and_after(run["held_out"])]
            if compared := run["answers"]:
                shown = ", ".join(f"{answers_text(values)} ({when})" for when, values in compared.items())
                yield ["dense model's answers", shown]
            for dataset, values in run["evaluation"].items():
                yield [f"perplexity, {dataset}, {window_text(values)}", before_and_after(values)]


def calibration_text(calibration: Mapping[str, Any]) -> str:
    """Return the calibration data in a few words: `"128 x 2048 tokens of c4, seed 0"`."""
    samples, length, source = (calibration.get(name, "?") for name in ("num_samples", "seq_length", "source"))
    seed, draw = calibration.get("seed"), " (the authors' draw)" if calibration.get("sampling") == "authors" else ""
    first = ", each begins with BOS" if calibration.get("add_bos") is True else ""
    return f"{samples} x {length} tokens of {source}" + ("" if seed is None else f", seed {seed}{draw}") + first


def answers_text(answers: Mapping[str, Any]) -> str:
    """Return how closely a model predicts the dense model's answers: `"KL divergence 0.517, same token 65.9%"`."""
    return f"KL divergence {answers['kl']:.3f}, same token {answers['agreement']:.1%}"


def training_text(run: Mapping[str, Any]) -> str:
    """Return how a model was fine-tuned, in a few words: `"500,000 tokens of c4, teacher me/llama, all weights"`."""
    config, teacher = run["config"], run["teacher"]
    but = f" but {run['frozen']}" if run.get("frozen") else ""
    weights = f"all weights{but}" if config["lora"] is None else f"LoRA of rank {config['lora']}"
    part = "" if config["kl_weight"] == 1 else f" ({config['kl_weight']:g} of the loss)"
    taught = f", teacher {teacher}{part}" if teacher else ""
    return f"{run['tokens']:,} tokens of {run['source']}{taught}, {weights}, learning rate {run['learning_rate']:g}"


def before_and_after(values: Mapping[str, float]) -> str:
    """Return the perplexities before and after a fine-tune: `"33.45 (before), 28.00 (after)"`."""
    return f"{values['before']:.2f} (before), {values['after']:.2f} (after)"


def window_text(values: Mapping[str, Any]) -> str:
    """Return what a perplexity was measured on: `"16 x 2048 tokens"`, or `"16 x 2048 tokens (BOS first)"`."""
    return f"{values['windows']} x {values['window']} tokens{' (BOS first)' if values.get('bos') else ''}"
