"""Tables of a comparison: one row per combination, and the paper's aggregates."""

import math
import statistics
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

from .results import DENSE, PRESET, Aggregate, Result, group_by


METHOD = ("sparsity", "saliency", "topup")  # what distinguishes the rows of a table
Table = tuple[list[str], list[list[str]], set[tuple[int, int]]]  # the arguments of [`format_markdown`]


class Column(NamedTuple):
    title: str
    values: Sequence[Any]  # None is shown as a dash
    text: Callable[[Any], str] = str
    best: Callable[[Iterable[Any]], Any] | None = None  # such as min


def make_table(columns: Sequence[Column], groups: Sequence[Hashable]) -> Table:
    """Return a table of columns. In every group of several rows, cells that read as the best of a column are bold.

    `groups` holds the group of every row, None for rows without.
    """
    cells = [["-" if value is None else column.text(value) for value in column.values] for column in columns]
    bold = set()
    for group in {*groups} - {None}:
        rows = [row for row, of_row in enumerate(groups) if of_row == group]
        for number, column in enumerate(columns):
            values = {row: column.values[row] for row in rows if column.values[row] is not None}
            if column.best is not None and len(values) > 1:
                best = column.text(column.best(values.values()))
                bold |= {(row, number) for row in values if cells[number][row] == best}
    return [column.title for column in columns], [list(row) for row in zip(*cells)], bold


def result_table(dense: Result, results: Sequence[Result]) -> Table:
    """Return a table with one row per combination below the dense model's row. The best at every sparsity is marked."""
    rows = [[dense], *group_by(results, *METHOD).values()]
    heads = [row[0] for row in rows]
    achieved = [mean_of(row, lambda result: result.achieved_sparsity)[0] for row in rows]
    sparsities = [head.sparsity if mean is None else mean for mean, head in zip(achieved, heads)]
    columns = [
        Column("sparsity", sparsities, "{:.2%}".format),
        Column("saliency", [head.saliency for head in heads]),
        Column("top-up", [None if head.saliency == DENSE else head.topup for head in heads]),
        column("bits per weight", rows, lambda result: result.bits_per_weight, "{:.2f}"),
        *measured_columns(dense, rows, tasks=list(dense.accuracy)),
        column("top-up seconds", rows, lambda result: result.allocation_seconds or None, "{:.1f}"),
        column("seconds", rows, lambda result: result.seconds or None, "{:.1f}"),
        column("peak GB", rows, lambda r: max(r.peak_memory.values(), default=0) / 1e9 or None, "{:.2f}"),
        Column("lambdas", [_lambdas(row) for row in rows]),
    ]
    return make_table(columns, [None, *(head.sparsity for head in heads[1:])])


def side_by_side_table(models: Sequence[tuple[str, Result, Sequence[Result]]]) -> Table:
    """Return a table with a row per method and columns of every model. The best of every saliency and sparsity is marked."""
    by_method = [group_by([dense, *results], *METHOD) for _, dense, results in models]
    keys = list(dict.fromkeys(key for groups in by_method for key in groups))
    heads = [Result(*key) for key in keys]
    columns = [
        Column("amount", [head.target for head in heads]),
        Column("saliency", [head.saliency for head in heads]),
        Column("top-up", [head.topup for head in heads]),
    ]
    for (name, dense, _), groups in zip(models, by_method):
        columns += measured_columns(dense, [groups.get(key, []) for key in keys], f"{name} ")
    return make_table(columns, [key[:2] for key in keys])


def aggregate_table(aggregates: Sequence[Aggregate]) -> Table:
    """Return a table with a row per top-up or preset, and a column per aggregate and sparsity. The best is marked."""
    topups = list(dict.fromkeys(entry.topup for entry in aggregates))
    entries = {(entry.topup, entry.sparsity): entry for entry in aggregates}
    measures: list[tuple] = [("PPLFac", "perplexity_factor", _short, min)]
    if any(entry.accuracy_retention is not None for entry in aggregates):
        measures.append(("AccRet", "accuracy_retention", "{:.1%}".format, max))
    if any(entry.improvement is not None for entry in aggregates):
        measures.append(("improvement", "improvement", "{:+.1%}".format, max))
    columns = [Column("top-up", topups)]
    for title, attribute, text, best in measures:
        for sparsity in dict.fromkeys(entry.sparsity for entry in aggregates):
            # None while the comparison runs, or if all combinations failed
            values = [getattr(entries.get((topup, sparsity)), attribute, None) for topup in topups]
            columns.append(Column(f"{title}, {100 * sparsity:.4g}%", values, text, best))
    return make_table(columns, ["all"] * len(topups))


def aggregate_caption(aggregates: Sequence[Aggregate]) -> str:
    """Return what the columns of [`aggregate_table`] mean."""
    names = _names(entry.saliencies for entry in aggregates)
    text = f"Geometric means relative to the dense model: of perplexity (PPLFac) over {names}"
    if any(entry.accuracy_retention is not None for entry in aggregates):
        names = _names(entry.accuracy_saliencies for entry in aggregates)
        text += f"; of mean accuracy (AccRet) over {names}"
    text += ". Only what every top-up has a result with counts"
    if any(entry.improvement is not None for entry in aggregates):
        text += ". Improvement: by how much perplexity is lower than with uniform sparsity, on average"
    return f"{text}."


def _names(lists: Iterable[Sequence[str]]) -> str:
    """Return each saliency once, its variant in parentheses: `"wanda, sparsegpt (authors)"`."""
    titles = dict.fromkeys(title for titles in lists for title in titles if title != PRESET)
    names = [
        name + rest.join((" (", ")") if rest else ("", "")) for name, _, rest in (t.partition(", ") for t in titles)
    ]
    return ", ".join(names) or "each preset's own saliency"


def measured_columns(
    dense: Result, rows: Sequence[Sequence[Result]], prefix: str = "", tasks: Sequence[str] = ()
) -> list[Column]:
    """Return columns of perplexities and accuracies. A row is the mean over its results."""
    columns = [
        column(f"{prefix}perplexity {name}", rows, lambda r, name=name: r.perplexity.get(name), best=min)
        for name in dense.perplexity
    ]
    for name in tasks:
        columns.append(column(name, rows, _of_task(name, "accuracy"), "{:.2%}", max, _of_task(name, "stderr")))
    if dense.accuracy:
        accuracy, error = attrgetter("mean_accuracy"), attrgetter("mean_accuracy_error")
        columns.append(column(f"{prefix}mean accuracy", rows, accuracy, "{:.2%}", max, error))
    return columns


def _of_task(name: str, what: str) -> Callable[[Result], float | None]:
    return lambda result: result.accuracy.get(name, {}).get(what)


def column(
    title: str,
    rows: Sequence[Sequence[Result]],
    value: Callable[[Result], float | None],
    text: str | None = None,
    best: Callable | None = None,
    error: Callable[[Result], float | None] | None = None,
) -> Column:
    """Return a column of means over the results of every row.

    If one is the best, each has the standard deviation of several results, or the standard `error` of a single one.
    """
    show = text.format if text else _short

    def shown(cell: tuple[float, float | None]) -> str:
        mean, deviation = cell
        return show(mean) if deviation is None or not best else f"{show(mean)} ± {show(deviation)}"

    cells = []
    for row in rows:
        mean, deviation = mean_of(row, value)
        if len(row) == 1 and error:
            deviation = mean_of(row, error)[0]
        cells.append(None if mean is None else (mean, deviation))
    return Column(title, cells, shown, best and partial(best, key=itemgetter(0)))


def mean_of(results: Iterable[Result], value: Callable[[Result], float | None]) -> tuple[float | None, float | None]:
    """Return the mean over results, and the standard deviation of several; None if no result has a value."""
    known = [number for result in results if result.error is None and (number := value(result)) is not None]
    if not known:
        return None, None
    mean = sum(known) / len(known)
    return mean, statistics.stdev(known) if len(known) > 1 and math.isfinite(mean) else None


def _lambdas(row: Sequence[Result]) -> str:
    """Return the chosen lambdas by step, in the order of the results, and why results are missing."""
    parts = list(dict.fromkeys(f"failed: {result.error}" for result in row if result.error is not None))
    for step in ("block", "row"):
        chosen = [getattr(result, f"{step}_lambda") for result in row]
        known = [f"{value:.2f}" if value == round(value, 2) else f"{value:g}" for value in chosen if value is not None]
        parts += [f"{step} {', '.join(known)}"] if known else []
    parts += dict.fromkeys(note for result in row if (note := result.decisions.get("note")))
    return "; ".join(parts)


def _short(value: float) -> str:
    return f"{value:.2f}" if value < 10000 else f"{value:.2e}"
