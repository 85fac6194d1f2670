"""The tables of a comparison, as text, with the best of every column marked."""

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from ..display import Cell
from .results import DENSE, Aggregate, Result, told_bits


Target = tuple[float, int | None]  # sparsity, and bits of values


class Table(NamedTuple):
    """What `format_table`, `format_markdown` and `format_html` of `display` take.

    Args:
        header (`list[str]`), rows (`list[list[str]]`): text.
        bold (`frozenset[tuple[int, int]]`): row and column of the best.
    """

    header: list[str]
    rows: list[list[str]]
    bold: frozenset[Cell]


class Told(NamedTuple):
    """A column that tells what a result is of: its title, and a result's text."""

    title: str
    text: Callable[[Result], str]


class Measure(NamedTuple):
    """A column of something measured: its title, a result's value and text, and what is better."""

    title: str
    value: Callable[[Any], float | None]
    text: Callable[[Any], str]
    best: Callable[[Iterable[float]], float]


def combination_table(dense: Result, results: Sequence[Result]) -> Table:
    """One row per combination below the dense model's; the best of every sparsity and number of bits is marked.

    Columns of bits are there where they are known: to how many values were rounded, and what a weight takes.
    """
    measures, shown = _measures(dense), [dense, *results]
    told = [
        Told("sparsity", lambda r: f"{r.achieved_sparsity if r.error is None else r.sparsity:.2%}"),
        Told("saliency", lambda r: r.saliency),
        Told("top-up", lambda r: "-" if r.saliency == DENSE else r.topup),
    ]
    if any(result.value_bits is not None for result in shown):
        told.append(Told("value bits", lambda r: "-" if r.value_bits is None else str(r.value_bits)))
    if any(result.bits_per_weight is not None for result in shown):
        told.append(Told("bits a weight", lambda r: "-" if r.bits_per_weight is None else f"{r.bits_per_weight:.2f}"))
    header = [*(column.title for column in told), *(measure.title for measure in measures)]
    header += ["allocation s", "pruning s", "peak GB", "lambda block / row"]
    groups: dict[tuple[float, int | None], list[int]] = {}
    for row, result in enumerate(results, 1):
        if result.error is None:
            groups.setdefault((result.sparsity, result.value_bits), []).append(row)
    bold = _best(shown, measures, len(told), groups.values())
    return Table(header, [_row(result, told, measures) for result in shown], bold)


def _measures(dense: Result) -> list[Measure]:
    def perplexity(name: str) -> Measure:
        def value(r):
            return r.perplexity[name]

        return Measure(f"perplexity {name}", value, lambda r: _short(value(r)), min)

    def accuracy(name: str) -> Measure:
        return Measure(name, lambda r: r.accuracy[name]["accuracy"], lambda r: _accuracy(r.accuracy[name]), max)

    found = [*map(perplexity, dense.perplexity), *map(accuracy, dense.accuracy)]
    if dense.accuracy:
        found.append(Measure("mean accuracy", lambda r: r.mean_accuracy, lambda r: f"{r.mean_accuracy:.2%}", max))
    return found


def _row(result: Result, told: Sequence[Told], measures: Sequence[Measure]) -> list[str]:
    start = [column.text(result) for column in told]
    if result.error is not None:
        return [*start, *["-"] * (len(measures) + 3), f"failed: {result.error}"]
    costs = ["", "", ""]
    if result.saliency != DENSE:
        peak = max(result.peak_memory.values(), default=0)
        costs = [f"{result.allocation_seconds:.1f}", f"{result.pruning_seconds:.1f}", f"{peak / 1e9:.2f}"]
    lambdas = [f"{value:g}" for value in (result.block_lambda, result.row_lambda) if value is not None]
    return [*start, *(measure.text(result) for measure in measures), *costs, " / ".join(lambdas)]


def aggregate_table(aggregates: Sequence[Aggregate], with_tasks: bool) -> Table:
    """One row per top-up, one column per sparsity, bits and aggregate; the best of every column is marked."""
    targets = list(dict.fromkeys((entry.sparsity, entry.value_bits) for entry in aggregates))
    topups = list(dict.fromkeys(entry.topup for entry in aggregates))
    found = {(entry.topup, entry.sparsity, entry.value_bits): entry for entry in aggregates}

    def measure(title: str, target: Target, name: str, text: Callable[[float], str], best: Callable) -> Measure:
        def value(topup):  # a comparison under way, or one that failed, has none
            return getattr(found.get((topup, *target)), name, None)

        def cell(topup):
            return "-" if value(topup) is None else text(value(topup))

        return Measure(f"{title}, {target[0]:.0%}{told_bits(target[1])}", value, cell, best)

    measures = [measure("perplexity x dense", t, "perplexity_factor", _short, min) for t in targets]
    if with_tasks:
        measures += [measure("accuracy retained", t, "accuracy_retention", "{:.1%}".format, max) for t in targets]
    rows = [[topup, *(measure.text(topup) for measure in measures)] for topup in topups]
    bold = _best(topups, measures, 1, [range(len(topups))])
    return Table(["top-up", *(measure.title for measure in measures)], rows, bold)


def _best(
    shown: Sequence, measures: Sequence[Measure], first: int, groups: Iterable[Sequence[int]]
) -> frozenset[Cell]:
    """The best of every group of rows in every column, from the first that holds measures; those that look alike too.

    Where there is nothing to choose from, nothing is best.
    """
    bold = set()
    for rows in groups:
        for column, measure in enumerate(measures, first):
            values = {row: value for row in rows if (value := measure.value(shown[row])) is not None}
            if len(values) < 2:
                continue
            best = measure.best(values.values())
            text = next(measure.text(shown[row]) for row, value in values.items() if value == best)
            bold |= {(row, column) for row in values if measure.text(shown[row]) == text}
    return frozenset(bold)


def to_csv(dense: Result, results: Sequence[Result]) -> str:
    """One line per combination, in full precision."""
    datasets, tasks = list(dense.perplexity), list(dense.accuracy)
    columns = ["saliency", "topup", "sparsity", "achieved_sparsity", "allocation_seconds", "pruning_seconds"]
    columns += ["block_lambda", "row_lambda", "value_bits", "bits_per_weight", "error"]
    header = [*columns, "peak_memory", *(f"perplexity {name}" for name in datasets)]
    header += [f"accuracy {name}" for name in tasks] + [f"stderr {name}" for name in tasks]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    for result in [dense, *results]:
        row = [getattr(result, column) for column in columns]
        row += [max(result.peak_memory.values(), default=None)]
        row += [result.perplexity.get(name) for name in datasets]
        row += [result.accuracy.get(name, {}).get(key) for key in ("accuracy", "stderr") for name in tasks]
        writer.writerow(row)
    return text.getvalue()


def _short(value: float) -> str:
    return f"{value:.2f}" if value < 10000 else f"{value:.2e}"


def _accuracy(task: dict[str, Any]) -> str:
    stderr = task.get("stderr")
    return f"{task['accuracy']:.2%}" + (f" ± {stderr:.2%}" if stderr is not None else "")
