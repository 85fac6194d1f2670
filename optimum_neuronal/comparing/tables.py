"""Tables of a comparison: one row per combination, and the paper's aggregates."""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import itemgetter

from ..common.display import Column, Table
from .results import DENSE, Aggregate, Result, group_by


MEANS = "Geometric means relative to the dense model, of perplexity (PPLFac) and of mean accuracy (AccRet), over"


def result_table(dense: Result, results: Sequence[Result]) -> Table:
    """Return a table with one row per combination below the dense model's row. The best at every sparsity is marked."""
    rows = [[dense], *group_by(results, "sparsity", "saliency", "topup").values()]
    heads = [row[0] for row in rows]
    achieved = [mean_of(row, lambda result: result.achieved_sparsity) for row in rows]
    shares = [mean[0] if mean else head.sparsity for mean, head in zip(achieved, heads)]
    columns = [
        Column("sparsity", shares, "{:.2%}".format),
        Column("saliency", [head.saliency for head in heads]),
        Column("top-up", [None if head.saliency == DENSE else head.topup for head in heads]),
        column("bits per weight", rows, lambda result: result.bits_per_weight, "{:.2f}"),
        *measured_columns(dense, rows, tasks=list(dense.accuracy)),
        column("top-up seconds", rows, lambda result: result.allocation_seconds or None, "{:.1f}"),
        column("seconds", rows, lambda result: result.seconds or None, "{:.1f}"),
        column("peak GB", rows, lambda r: max(r.peak_memory.values(), default=0) / 1e9 or None, "{:.2f}"),
        Column("lambda block / row", ["; ".join(dict.fromkeys(map(_chosen, row))) for row in rows]),
    ]
    return Table.of(columns, [None, *(head.sparsity for head in heads[1:])])


def aggregate_table(aggregates: Sequence[Aggregate]) -> Table:
    """Return a table with a row per top-up or preset, and a column per aggregate and sparsity. The best is marked."""
    topups = list(dict.fromkeys(entry.topup for entry in aggregates))
    entries = {(entry.topup, entry.sparsity): entry for entry in aggregates}
    measures: list[tuple] = [("PPLFac", "perplexity_factor", _short, min)]
    if any(entry.accuracy_retention is not None for entry in aggregates):
        measures.append(("AccRet", "accuracy_retention", "{:.1%}".format, max))
    columns = [Column("top-up", topups)]
    for title, attribute, text, best in measures:
        for sparsity in dict.fromkeys(entry.sparsity for entry in aggregates):
            # None while the comparison runs, or if all combinations failed
            values = [getattr(entries.get((topup, sparsity)), attribute, None) for topup in topups]
            columns.append(Column(f"{title}, {sparsity:.0%}", values, text, best))
    return Table.of(columns, ["all"] * len(topups))


def aggregate_caption(aggregates: Sequence[Aggregate]) -> str:
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
        means = column(name, rows, lambda r, name=name: r.accuracy.get(name, {}).get("accuracy"), "{:.2%}", max)
        errors = [row[0].accuracy.get(name, {}).get("stderr") if len(row) == 1 else None for row in rows]
        values = [v and (v[0], error if v[1] is None else v[1]) for v, error in zip(means.values, errors)]
        columns.append(means._replace(values=values))
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
    known = [number for result in results if result.error is None and (number := value(result)) is not None]
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
