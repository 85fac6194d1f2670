"""Outcome of a comparison of methods: results, the paper's aggregates, tables, figures and files."""

import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from ..common.display import Column, Table, format_markdown, format_table
from ..files.atomic import write_atomically
from ..files.directories import check_writable
from .figures import draw_figures
from .results import DENSE, Aggregate, Result, aggregate, grouped


JSON, PAGE = TABLES = ("comparison.json", "comparison.md")
MEANS = "Geometric means relative to the dense model, of perplexity (PPLFac) and of mean accuracy (AccRet), over"


def check_output(directory: str | Path, overwrite: bool) -> Path:
    """Return a directory to write tables to. Raise `FileExistsError` if it has tables that no comparison wrote."""
    folder = check_writable(directory, "write tables to")
    taken = [name for name in TABLES if (folder / name).exists()]
    if taken and not overwrite:
        try:
            Comparison.load(folder)
        except (OSError, ValueError):
            raise FileExistsError(
                f"{folder / taken[0]} was not written by a comparison: choose another directory, or overwrite it "
                "(overwrite=True, --overwrite)."
            ) from None
    return folder


@dataclass(repr=False)
class Comparison:
    """Outcome of [`compare`]. `print(comparison)` shows tables, `comparison.plot(directory)` draws figures."""

    model: str  # name of the pruned model
    dense: Result  # figures of the dense model
    results: list[Result]  # one per combination, and with a sweep per combination and setting
    calibration: dict[str, Any]  # source, number and length of the sequences, seed
    versions: dict[str, str]  # of this package, transformers, torch and Python
    windows: dict[str, list[int]] = field(default_factory=dict)  # test set -> number of windows, tokens in each
    config: dict[str, Any] = field(default_factory=dict)  # fields that all combinations were given

    @classmethod
    def load(cls, directory: str | Path) -> "Comparison":
        """Read the `comparison.json` of a directory. Raise `ValueError` if no comparison wrote it."""
        path = Path(directory) / JSON
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            own = {entry.name: found[entry.name] for entry in fields(cls) if entry.name in found}
            results = [Result(**result) for result in own["results"]]
            return cls(**own | {"dense": Result(**own["dense"]), "results": results})
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path} was not written by a comparison: {error}") from error

    @property
    def failed(self) -> list[Result]:
        return [result for result in self.results if result.error is not None]

    def aggregates(self) -> list[Aggregate]:
        """Return an aggregate over the saliencies for each amount and top-up or preset."""
        return aggregate([(self.dense, self.results)])

    def to_dict(self) -> dict[str, Any]:
        """Return everything, with the aggregates, JSON-serializable."""
        return {**asdict(self), "aggregates": [asdict(one) for one in self.aggregates()]}

    def notes(self) -> list[str]:
        """Return what the figures were measured on, in sentences."""
        notes, settings = [], [result.setting for result in self.results]
        swept = dict.fromkeys(name for setting in settings for name in setting)
        if self.calibration:
            known = {name: "several" if name in swept else value for name, value in self.calibration.items()}
            source = "several datasets" if "dataset" in swept else known["source"]
            seed = "" if known["seed"] is None or "seed" in swept else f", seed {known['seed']}"
            notes.append(f"Calibration: {known['num_samples']} x {known['seq_length']} tokens of {source}{seed}.")
        given = ", ".join(f"{name}={value!r}" for name, value in self.config.items() if name not in self.calibration)
        if given:
            notes.append(f"All with {given}.")
        for name in swept:
            values = ", ".join(dict.fromkeys(str(setting[name]) for setting in settings if name in setting))
            notes.append(f"Means over {name} {values}, ± the standard deviation.")
        found = [f"{name} ({count} x {tokens} tokens)" for name, (count, tokens) in self.windows.items()]
        if found:
            notes.append(f"Perplexity: {', '.join(found)}.")
        if self.dense.accuracy:
            asked = [f"{name} ({task['samples']} questions)" for name, task in self.dense.accuracy.items()]
            spread = "the standard error" + (", or of a mean the standard deviation" if swept else "")
            notes.append(f"Zero-shot accuracy, ± {spread}: {', '.join(asked)}.")
        return notes

    def table(self) -> Table:
        """Return the main table: one row per combination below the dense model's row. The best of every amount is marked."""
        rows = [[self.dense], *grouped(self.results, "sparsity", "saliency", "topup", "budget").values()]
        heads = [row[0] for row in rows]
        achieved = [mean_of(row, lambda result: result.achieved_sparsity) for row in rows]
        shares = [own[0] if own else head.sparsity for own, head in zip(achieved, heads)]
        columns = [
            Column("sparsity", shares, "{:.2%}".format),
            Column("saliency", [head.saliency for head in heads]),
            Column("top-up", [None if head.saliency == DENSE else head.topup for head in heads]),
            column("bits per weight", rows, lambda result: result.bits_per_weight, "{:.2f}"),
            *measured_columns(self.dense, rows, tasks=list(self.dense.accuracy)),
            column("top-up seconds", rows, lambda result: result.allocation_seconds or None, "{:.1f}"),
            column("seconds", rows, lambda result: result.seconds or None, "{:.1f}"),
            column("peak GB", rows, lambda r: max(r.peak_memory.values(), default=0) / 1e9 or None, "{:.2f}"),
            Column("lambda block / row", ["; ".join(dict.fromkeys(map(_chosen, row))) for row in rows]),
        ]
        return Table.of(columns, [None, *((head.sparsity, head.budget) for head in heads[1:])])

    def __repr__(self) -> str:
        return self._shown(lambda header, rows, bold: format_table(header, rows))

    def to_markdown(self) -> str:
        """Return both tables in Markdown, with what they were measured on and the versions."""
        made_by = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return f"# {self.model}\n\n{self._shown(format_markdown)}\n\nVersions: {made_by}.\n"

    def _shown(self, show: Callable[..., str]) -> str:
        means = self.aggregates()
        return "\n\n".join([*self.notes(), show(*self.table()), explain(means), show(*aggregate_table(means))])

    def save(self, directory: str | Path, overwrite: bool = False) -> None:
        """Write `comparison.json` and `.md` into a directory. See [`check_output`]."""
        folder = check_output(directory, overwrite)
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / JSON, f"{json.dumps(self.to_dict(), indent=2)}\n".encode())
        write_atomically(folder / PAGE, self.to_markdown().encode())

    def plot(self, directory: str | Path) -> list[Path]:
        """Draw all figures that the results allow into a directory; return their paths."""
        return draw_figures(Path(directory), self.model, self.dense, self.results)


def aggregate_table(aggregates: Sequence[Aggregate]) -> Table:
    """Return a table with a row per top-up or preset and a column per aggregate and amount. The best is marked."""
    topups = list(dict.fromkeys(entry.topup for entry in aggregates))
    found = {(entry.topup, entry.sparsity, entry.budget): entry for entry in aggregates}
    measures: list[tuple] = [("PPLFac", "perplexity_factor", _short, min)]
    if any(entry.accuracy_retention is not None for entry in aggregates):
        measures.append(("AccRet", "accuracy_retention", "{:.1%}".format, max))
    columns = [Column("top-up", topups)]
    for title, attribute, text, best in measures:
        for sparsity, budget in dict.fromkeys((entry.sparsity, entry.budget) for entry in aggregates):
            # None while the comparison runs, or if all combinations failed
            values = [getattr(found.get((topup, sparsity, budget)), attribute, None) for topup in topups]
            asked = f"{sparsity:.0%}" if budget is None else f"{budget:g} bits"
            columns.append(Column(f"{title}, {asked}", values, text, best))
    return Table.of(columns, ["all"] * len(topups))


def explain(aggregates: Sequence[Aggregate]) -> str:
    """Return what the columns of [`aggregate_table`] mean."""
    return f"{MEANS} {', '.join(dict.fromkeys(name for entry in aggregates for name in entry.saliencies))}."


def measured_columns(
    dense: Result, rows: Sequence[Sequence[Result]], prefix: str = "", tasks: Sequence[str] = ()
) -> list[Column]:
    """Return columns of perplexities and accuracies. A row is the mean over its results."""
    columns = [
        column(f"{prefix}perplexity {name}", rows, lambda r, name=name: r.perplexity.get(name), best=min)
        for name in dense.perplexity
    ]
    for name in tasks:
        found = column(name, rows, lambda r, name=name: r.accuracy.get(name, {}).get("accuracy"), "{:.2%}", max)
        errors = [row[0].accuracy.get(name, {}).get("stderr") if len(row) == 1 else None for row in rows]
        values = [v and (v[0], error if v[1] is None else v[1]) for v, error in zip(found.values, errors)]
        columns.append(found._replace(values=values))
    if dense.accuracy:
        columns.append(column(f"{prefix}mean accuracy", rows, lambda result: result.mean_accuracy, "{:.2%}", max))
    return columns


def column(
    title: str,
    rows: Sequence[Sequence[Result]],
    value: Callable[[Result], float | None],
    text: str | None = None,
    best: Callable | None = None,
) -> Column:
    """Return a column of means over the results of every row; if one is the best, with their standard deviations."""
    show = text.format if text else _short

    def shown(pair: tuple[float, float | None]) -> str:
        return show(pair[0]) if pair[1] is None or best is None else f"{show(pair[0])} ± {show(pair[1])}"

    return Column(title, [mean_of(row, value) for row in rows], shown, best and partial(best, key=itemgetter(0)))


def mean_of(results: Iterable[Result], value: Callable[[Result], float | None]) -> tuple[float, float | None] | None:
    """Return the mean over results, and the standard deviation of several."""
    known = [found for result in results if result.error is None and (found := value(result)) is not None]
    if not known:
        return None
    mean = sum(known) / len(known)
    return mean, statistics.stdev(known) if len(known) > 1 and math.isfinite(mean) else None


def _chosen(result: Result) -> str:
    if result.error is not None:
        return f"failed: {result.error}"
    return " / ".join(f"{value:g}" for value in (result.block_lambda, result.row_lambda) if value is not None)


def _short(value: float) -> str:
    return f"{value:.2f}" if value < 10000 else f"{value:.2e}"
