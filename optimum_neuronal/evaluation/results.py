"""The outcome of a comparison of methods: rows, the paper's aggregates, tables and files."""

import csv
import io
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..runtime.journal import write_durably
from ..runtime.tables import format_table


NAME = "comparison"
DENSE = "dense"


@dataclass
class Result:
    """One combination: a row of the table.

    Args:
        sparsity (`float`): share of zeros asked for, in [0, 1); 0 for the dense model.
        saliency, topup (`str`): the methods, with the hyper-parameters that were given; `"dense"` for the dense model.
        perplexity (`dict[str, float]`): by test set, at least 1, lower is better.
        accuracy (`dict[str, dict]`): task -> `accuracy` in [0, 1], `stderr`, `metric`, `samples`.
        achieved_sparsity (`float`): share of zeros, counted.
        block_sparsity (`list[float]`): the same by block.
        row_sparsity (`dict[str, list[float]]`):
            Projection name -> sparsity of its rows, averaged over stretches of them, if rows may differ.
        allocation_seconds, pruning_seconds (`float`): wall-clock time of the top-up, and of the final pruning.
        peak_memory (`dict[str, int]`): bytes by device while it was pruned, the model included.
        block_lambda, row_lambda (`float`, *optional*): what NeuronAL chose.
        decisions (`dict`): what the top-up tried.
        config (`dict`): the `NeuronALConfig`.
        error (`str`, *optional*): why there are no figures.
    """

    sparsity: float
    saliency: str
    topup: str
    perplexity: dict[str, float] = field(default_factory=dict)
    accuracy: dict[str, dict[str, Any]] = field(default_factory=dict)
    achieved_sparsity: float = 0.0
    block_sparsity: list[float] = field(default_factory=list)
    row_sparsity: dict[str, list[float]] = field(default_factory=dict)
    allocation_seconds: float = 0.0
    pruning_seconds: float = 0.0
    peak_memory: dict[str, int] = field(default_factory=dict)
    block_lambda: float | None = None
    row_lambda: float | None = None
    decisions: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    error: str | None = None

    @property
    def mean_accuracy(self) -> float | None:
        """Mean accuracy over the tasks, in [0, 1]."""
        return sum(task["accuracy"] for task in self.accuracy.values()) / len(self.accuracy) if self.accuracy else None


@dataclass(frozen=True)
class Aggregate:
    """A top-up at one sparsity over all saliencies and test sets (paper, section 5.3).

    Args:
        sparsity (`float`), topup (`str`): which.
        perplexity_factor (`float`): geometric mean of perplexity over the dense model's; lower is better.
        accuracy_retention (`float`, *optional*): geometric mean of mean accuracy over the dense model's.
        saliencies (`int`): over how many saliencies; those that failed are missing.
    """

    sparsity: float
    topup: str
    perplexity_factor: float | None
    accuracy_retention: float | None
    saliencies: int


@dataclass
class Comparison:
    """What [`compare`] found. `print(comparison)` shows it as tables.

    Args:
        model (`str`): what was pruned.
        dense (`Result`): the dense model's figures.
        results (`list[Result]`): one per combination, by sparsity, saliency and top-up in the order asked for.
        calibration (`dict`): source, number and length of the sequences, seed.
        versions (`dict`): of this package, transformers, torch and Python.
    """

    model: str
    dense: Result
    results: list[Result]
    calibration: dict[str, Any]
    versions: dict[str, str]

    @property
    def failed(self) -> list[Result]:
        """The results that are an error instead of figures."""
        return [result for result in self.results if result.error is not None]

    def aggregates(self) -> list[Aggregate]:
        """One aggregate for each sparsity and top-up, in their order."""
        groups: dict[tuple[float, str], list[Result]] = {}
        for result in self.results:
            groups.setdefault((result.sparsity, result.topup), [])
            if result.error is None:
                groups[result.sparsity, result.topup].append(result)
        return [self._aggregate(*key, results) for key, results in groups.items()]

    def _aggregate(self, sparsity: float, topup: str, results: Sequence[Result]) -> Aggregate:
        factors = [r.perplexity[name] / self.dense.perplexity[name] for r in results for name in r.perplexity]
        retained = [r.mean_accuracy / self.dense.mean_accuracy for r in results if self.dense.mean_accuracy]
        return Aggregate(sparsity, topup, geometric_mean(factors), geometric_mean(retained), len(results))

    def to_dict(self) -> dict[str, Any]:
        """All that was found, with the aggregates, JSON-serialisable."""
        return {**asdict(self), "aggregates": [asdict(aggregate) for aggregate in self.aggregates()]}

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Header and rows of the main table, as text."""
        datasets, tasks = list(self.dense.perplexity), list(self.dense.accuracy)
        header = ["sparsity", "saliency", "top-up", *(f"perplexity {name}" for name in datasets), *tasks]
        header += ["mean accuracy"] * bool(tasks)
        header += ["allocation s", "pruning s", "peak GB", "lambda block / row"]
        return header, [self._row(result, datasets, tasks) for result in [self.dense, *self.results]]

    def _row(self, result: Result, datasets: Sequence[str], tasks: Sequence[str]) -> list[str]:
        start = [f"{result.achieved_sparsity:.2%}", result.saliency, result.topup]
        if result.error is not None:
            start[0] = f"{result.sparsity:.2%}"
            blanks = len(datasets) + len(tasks) + bool(tasks) + 3
            return [*start, *["-"] * blanks, f"failed: {result.error}"]
        perplexities = [_short(result.perplexity[name]) for name in datasets]
        accuracies = [_accuracy(result.accuracy[name]) for name in tasks]
        if tasks:
            accuracies.append(f"{result.mean_accuracy:.2%}")
        costs = ["", "", ""]
        if result.saliency != DENSE:
            peak = max(result.peak_memory.values(), default=0)
            costs = [f"{result.allocation_seconds:.1f}", f"{result.pruning_seconds:.1f}", f"{peak / 1e9:.2f}"]
        lambdas = [f"{value:g}" for value in (result.block_lambda, result.row_lambda) if value is not None]
        return [*start, *perplexities, *accuracies, *costs, " / ".join(lambdas)]

    def aggregate_table(self) -> tuple[list[str], list[list[str]]]:
        """Header and rows of the aggregates: one row per top-up."""
        aggregates = self.aggregates()
        sparsities = list(dict.fromkeys(entry.sparsity for entry in aggregates))
        with_tasks = bool(self.dense.accuracy)
        header = ["top-up", *(f"perplexity x dense, {value:.0%}" for value in sparsities)]
        header += [f"accuracy retained, {value:.0%}" for value in sparsities] * with_tasks
        found = {(entry.topup, entry.sparsity): entry for entry in aggregates}
        rows = []
        for topup in dict.fromkeys(entry.topup for entry in aggregates):
            missing = [Aggregate(value, topup, None, None, 0) for value in sparsities]  # a comparison under way
            own = [found.get((topup, entry.sparsity), entry) for entry in missing]
            cells = ["-" if entry.perplexity_factor is None else _short(entry.perplexity_factor) for entry in own]
            if with_tasks:
                cells += [
                    "-" if entry.accuracy_retention is None else f"{entry.accuracy_retention:.1%}" for entry in own
                ]
            rows.append([topup, *cells])
        return header, rows

    def __str__(self) -> str:
        return f"{format_table(*self.table())}\n\n{format_table(*self.aggregate_table())}"

    def to_markdown(self) -> str:
        """Both tables in Markdown, with what they were measured on."""
        lines = [f"# {self.model}", ""]
        if self.calibration:
            lines += ["Calibration: {num_samples} x {seq_length} tokens of {source}.".format(**self.calibration), ""]
        lines += [*_markdown(*self.table()), "", "Over all saliencies (geometric mean):", ""]
        lines += _markdown(*self.aggregate_table())
        return "\n".join(lines) + "\n"

    def to_csv(self) -> str:
        """The table as CSV, one line per combination, in full precision."""
        datasets, tasks = list(self.dense.perplexity), list(self.dense.accuracy)
        columns = ["saliency", "topup", "sparsity", "achieved_sparsity", "allocation_seconds", "pruning_seconds"]
        columns += ["block_lambda", "row_lambda", "error"]
        header = [*columns, "peak_memory", *(f"perplexity {name}" for name in datasets)]
        header += [f"accuracy {name}" for name in tasks] + [f"stderr {name}" for name in tasks]
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(header)
        for result in [self.dense, *self.results]:
            row = [getattr(result, column) for column in columns]
            row += [max(result.peak_memory.values(), default=None)]
            row += [result.perplexity.get(name) for name in datasets]
            row += [result.accuracy.get(name, {}).get(key) for key in ("accuracy", "stderr") for name in tasks]
            writer.writerow(row)
        return text.getvalue()

    def save(self, directory: str | Path) -> list[Path]:
        """Writes `comparison.json`, `.csv` and `.md` into an existing directory and returns their paths."""
        content = {
            ".json": json.dumps(self.to_dict(), indent=2) + "\n",
            ".csv": self.to_csv(),
            ".md": self.to_markdown(),
        }
        paths = []
        for suffix, text in content.items():
            paths.append(Path(directory) / f"{NAME}{suffix}")
            write_durably(paths[-1], text.encode())
        return paths


def geometric_mean(values: Sequence[float]) -> float | None:
    """Geometric mean of numbers of at least 0, which may be infinite; None if there are none."""
    if not values:
        return None
    return math.exp(sum(math.log(value) if value > 0 else -math.inf for value in values) / len(values))


def _short(value: float) -> str:
    return f"{value:.2f}" if value < 10000 else f"{value:.2e}"


def _accuracy(task: dict[str, Any]) -> str:
    stderr = task.get("stderr")
    return f"{task['accuracy']:.2%}" + (f" ± {stderr:.2%}" if stderr is not None else "")


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
