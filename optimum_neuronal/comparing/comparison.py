"""Outcome of a comparison of methods: results, the paper's aggregates, tables, figures and files."""

import csv
import html
import io
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from ..common.display import Column, Table, format_html, format_markdown, format_table
from ..files.directories import check_writable
from .figures import draw_figures
from .results import DENSE, Aggregate, Result, geometric_mean, grouped


JSON, CSV, PAGE = TABLES = ("comparison.json", "comparison.csv", "comparison.md")
OVER_ALL = "Over all saliencies (geometric mean)"


def check_output(directory: str | Path, overwrite: bool) -> Path:
    """Return a directory to write tables to. Raise `FileExistsError` if it has tables that no comparison wrote."""
    folder = check_writable(directory, "write tables to")
    taken = [name for name in TABLES if (folder / name).exists()]
    if taken and not overwrite:
        try:
            found = json.loads((folder / JSON).read_text(encoding="utf-8"))
            ours = found.keys() >= {"model", "dense", "results", "aggregates"}
        except (OSError, ValueError, AttributeError):
            ours = False
        if not ours:
            raise FileExistsError(
                f"{folder / taken[0]} was not written by a comparison: choose another directory, or overwrite it "
                "(overwrite=True, --overwrite)."
            )
    return folder


@dataclass(repr=False)
class Comparison:
    """Outcome of [`compare`]. `print(comparison)` shows tables, `comparison.plot(directory)` draws figures."""

    model: str  # name of the pruned model
    dense: Result  # figures of the dense model
    results: list[Result]  # one per combination
    calibration: dict[str, Any]  # source, number and length of the sequences, seed
    versions: dict[str, str]  # of this package, transformers, torch and Python

    @property
    def failed(self) -> list[Result]:
        return [result for result in self.results if result.error is not None]

    def aggregates(self) -> list[Aggregate]:
        """Return an aggregate over the saliencies for each amount and top-up or preset."""
        found = []
        for (sparsity, topup, budget), members in grouped(self.results, "sparsity", "label", "budget").items():
            members = [result for result in members if result.error is None]
            factors = [r.perplexity[name] / self.dense.perplexity[name] for r in members for name in r.perplexity]
            retained = [r.mean_accuracy / self.dense.mean_accuracy for r in members if self.dense.mean_accuracy]
            means = geometric_mean(factors), geometric_mean(retained)
            found.append(Aggregate(sparsity, topup, *means, len(members), budget))
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return everything, with the aggregates, JSON-serializable."""
        return {**asdict(self), "aggregates": [asdict(aggregate) for aggregate in self.aggregates()]}

    def table(self) -> Table:
        """Return the main table: one row per combination below the dense model's row. The best of every amount is marked."""
        shown = [self.dense, *self.results]
        columns = [
            Column("sparsity", [r.sparsity if r.error else r.achieved_sparsity for r in shown], "{:.2%}".format),
            Column("saliency", [r.saliency for r in shown]),
            Column("top-up", [None if r.saliency == DENSE else r.topup for r in shown]),
            Column("bits per weight", [r.bits_per_weight for r in shown], "{:.2f}".format),
        ]
        for name in self.dense.perplexity:
            columns.append(Column(f"perplexity {name}", [r.perplexity.get(name) for r in shown], _short, min))
        most_accurate = partial(max, key=itemgetter("accuracy"))
        for name in self.dense.accuracy:
            columns.append(Column(name, [r.accuracy.get(name) for r in shown], _with_error, most_accurate))
        if self.dense.accuracy:
            columns.append(Column("mean accuracy", [r.mean_accuracy for r in shown], "{:.2%}".format, max))
        peaks = [max(r.peak_memory.values(), default=0) / 1e9 or None for r in shown]
        columns.append(Column("seconds", [r.seconds or None for r in shown], "{:.1f}".format))
        columns.append(Column("peak GB", peaks, "{:.2f}".format))
        lambdas = [[f"{value:g}" for value in (r.block_lambda, r.row_lambda) if value is not None] for r in shown]
        texts = [f"failed: {r.error}" if r.error else " / ".join(own) for r, own in zip(shown, lambdas)]
        columns.append(Column("lambda block / row", texts))
        return Table.of(columns, [None, *((r.sparsity, r.budget) for r in self.results)])

    def aggregate_table(self) -> Table:
        """Return a table with a row per top-up or preset and a column per amount and aggregate. The best is marked."""
        aggregates = self.aggregates()
        topups = list(dict.fromkeys(entry.topup for entry in aggregates))
        found = {(entry.topup, entry.sparsity, entry.budget): entry for entry in aggregates}
        measures: list[tuple] = [("perplexity x dense", "perplexity_factor", _short, min)]
        if self.dense.accuracy:
            measures.append(("accuracy retained", "accuracy_retention", "{:.1%}".format, max))
        columns = [Column("top-up", topups)]
        for title, attribute, text, best in measures:
            for sparsity, budget in dict.fromkeys((entry.sparsity, entry.budget) for entry in aggregates):
                # None while the comparison runs, or if all combinations failed
                values = [getattr(found.get((topup, sparsity, budget)), attribute, None) for topup in topups]
                asked = f"{sparsity:.0%}" if budget is None else f"{budget:g} bits"
                columns.append(Column(f"{title}, {asked}", values, text, best))
        return Table.of(columns, ["all"] * len(topups))

    def __str__(self) -> str:
        return f"{format_table(*self.table()[:2])}\n\n{format_table(*self.aggregate_table()[:2])}"

    def __repr__(self) -> str:
        failed = f", {len(self.failed)} failed" if self.failed else ""
        return f"Comparison({self.model}, {len(self.results)} combinations{failed})"

    def _repr_html_(self) -> str:
        tables = f"{format_html(*self.table())}\n<p>{OVER_ALL}:</p>\n{format_html(*self.aggregate_table())}"
        return f"<p><b>{html.escape(self.model)}</b></p>\n{tables}"

    def to_markdown(self) -> str:
        """Return both tables in Markdown, with the calibration data and the versions."""
        parts = [f"# {self.model}"]
        if self.calibration:
            text = "Calibration: {num_samples} x {seq_length} tokens of {source}, seed {seed}."
            parts.append(text.format(**self.calibration))
        parts.append("Versions: " + ", ".join(f"{name} {version}" for name, version in self.versions.items()) + ".")
        parts += [format_markdown(*self.table()), f"{OVER_ALL}:", format_markdown(*self.aggregate_table())]
        return "\n\n".join(parts) + "\n"

    def to_csv(self) -> str:
        """Return the main table as CSV, one line per combination, in full precision."""
        columns = ["saliency", "topup", "sparsity", "achieved_sparsity", "rotation_seconds", "allocation_seconds"]
        columns += ["pruning_seconds", "block_lambda", "row_lambda", "budget", "bits_per_weight", "error"]
        rows = []
        for result in [self.dense, *self.results]:
            row = {column: getattr(result, column) for column in columns}
            row["peak_memory"] = max(result.peak_memory.values(), default=None)
            row |= {f"perplexity {name}": result.perplexity.get(name) for name in self.dense.perplexity}
            for kind in ("accuracy", "stderr"):
                row |= {f"{kind} {name}": result.accuracy.get(name, {}).get(kind) for name in self.dense.accuracy}
            rows.append(row)
        text = io.StringIO()
        writer = csv.DictWriter(text, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue()

    def save(self, directory: str | Path, overwrite: bool = False) -> list[Path]:
        """Write `comparison.json`, `.csv` and `.md` into a directory; return their paths. See [`check_output`]."""
        folder = check_output(directory, overwrite)
        folder.mkdir(parents=True, exist_ok=True)
        contents = (json.dumps(self.to_dict(), indent=2) + "\n", self.to_csv(), self.to_markdown())
        for name, content in zip(TABLES, contents):
            (folder / name).write_text(content, encoding="utf-8")
        return [folder / name for name in TABLES]

    def plot(self, directory: str | Path) -> list[Path]:
        """Draw all figures that the results allow into a directory; return their paths."""
        paths = []
        for name, files in draw_figures(self.model, self.dense, self.results).items():
            for suffix, content in files.items():
                paths.append(Path(directory) / f"{name}{suffix}")
                paths[-1].parent.mkdir(parents=True, exist_ok=True)
                paths[-1].write_bytes(content)
        return paths


def _short(value: float) -> str:
    return f"{value:.2f}" if value < 10000 else f"{value:.2e}"


def _with_error(task: Mapping[str, Any]) -> str:
    return f"{task['accuracy']:.2%}" + ("" if task["stderr"] is None else f" ± {task['stderr']:.2%}")
