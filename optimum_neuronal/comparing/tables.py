"""Tables of a comparison: one row per combination, and the paper's aggregates."""

import math
import statistics
from collections.abc import Callable, Hashable, Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple

from .results import DENSE, PRESET, Aggregate, Result, group_by


Table = tuple[list[str], list[list[str]], set[tuple[int, int]]]  # the arguments of [`format_markdown`]


def _short(value: float) -> str:
    return f"{value:.2f}" if value < 10000 else f"{value:.2e}"


class Column(NamedTuple):
    title: str
    texts: Sequence[str]
    values: Sequence[float | None] = ()  # None: without a value
    best: Callable | None = None  # of values, such as min


def make_table(columns: Sequence[Column], groups: Sequence[Hashable]) -> Table:
    """Return a table of columns. In every group of several rows, cells that read as the best of a column are bold.

    `groups` holds the group of every row, None for rows without.
    """
    bold = set()
    for group in {*groups} - {None}:
        for number, (_, texts, values, best) in enumerate(columns):
            known = [row for row, own in enumerate(groups) if best and own == group and values[row] is not None]
            if best and len(known) > 1:
                text = texts[best(known, key=values.__getitem__)]
                bold |= {(row, number) for row in known if texts[row] == text}
    return [column.title for column in columns], [list(row) for row in zip(*(c.texts for c in columns))], bold


def result_table(dense: Result, results: Sequence[Result]) -> Table:
    """Return a table with one row per combination below the dense model's row. The best at every sparsity is marked."""
    rows = [[dense], *group_by(results, "sparsity", "saliency", "topup").values()]
    heads = [row[0] for row in rows]
    columns = [
        Column("sparsity", [f"{head.achieved_sparsity or head.sparsity:.2%}" for head in heads]),
        Column("saliency", [head.saliency for head in heads]),
        Column("top-up", ["-" if head.topup == DENSE else head.topup for head in heads]),
        column("bits per weight", rows, attrgetter("bits_per_weight")),
        *_measured_columns(dense, rows),
        column("top-up seconds", rows, lambda result: result.allocation_seconds or None, "{:.1f}".format),
        column("seconds", rows, lambda result: result.seconds or None, "{:.1f}".format),
        column("peak GB", rows, lambda result: max(result.peak_memory.values(), default=0) / 1e9 or None),
        Column("lambdas", [_lambdas(row) for row in rows]),
    ]
    return make_table(columns, [None, *(head.sparsity for head in heads[1:])])


MEANS: tuple[tuple, ...] = (  # titles of columns, attributes of an aggregate, their text, and which is the best
    ("PPLFac", "perplexity_factor", _short, min),
    ("AccRet", "accuracy_retention", "{:.1%}".format, max),
    ("improvement", "improvement", "{:+.1%}".format, max),
)


def aggregate_table(aggregates: Sequence[Aggregate]) -> Table:
    """Return a table with a row per top-up or preset, and a column per aggregate and sparsity. The best is marked."""
    topups = list(dict.fromkeys(entry.topup for entry in aggregates))
    entries = {(entry.topup, entry.sparsity): entry for entry in aggregates}
    columns = [Column("top-up", topups)]
    for title, attribute, text, best in MEANS:
        if all(getattr(entry, attribute) is None for entry in aggregates):
            continue
        for sparsity in dict.fromkeys(entry.sparsity for entry in aggregates):
            # None while the comparison runs, or if all combinations failed
            values = [getattr(entries.get((topup, sparsity)), attribute, None) for topup in topups]
            texts = ["-" if value is None else text(value) for value in values]
            columns.append(Column(f"{title}, {100 * sparsity:.4g}%", texts, values, best))
    return make_table(columns, ["all"] * len(topups))


def aggregate_caption(aggregates: Sequence[Aggregate]) -> str:
    """Return what the columns of [`aggregate_table`] mean."""
    names = _names(entry.saliencies for entry in aggregates)
    text = f"PPLFac: perplexity relative to the dense model, the geometric mean over {names}."
    if any(entry.accuracy_retention is not None for entry in aggregates):
        names = _names(entry.accuracy_saliencies for entry in aggregates)
        text += f" AccRet: mean accuracy relative to the dense model, the geometric mean over {names}."
    if any(entry.improvement is not None for entry in aggregates):
        text += " Improvement: by how much perplexity is lower than with uniform sparsity, on average."
    return f"{text} At each sparsity, only what every top-up has a result with counts."


def _names(lists: Iterable[Sequence[str]]) -> str:
    titles = dict.fromkeys(title for titles in lists for title in titles if title != PRESET)
    return "; ".join(titles) or "each preset's own saliency"


def _measured_columns(dense: Result, rows: Sequence[Sequence[Result]]) -> list[Column]:
    columns = [
        column(f"perplexity {name}", rows, lambda r, name=name: r.perplexity.get(name), best=min)
        for name in dense.perplexity
    ]
    for name in dense.accuracy:
        columns.append(column(name, rows, _of_task(name, "accuracy"), "{:.2%}".format, max, _of_task(name, "stderr")))
    if dense.accuracy:
        accuracy, error = attrgetter("mean_accuracy"), attrgetter("mean_accuracy_error")
        columns.append(column("mean accuracy", rows, accuracy, "{:.2%}".format, max, error))
    return columns


def _of_task(name: str, what: str) -> Callable[[Result], float | None]:
    return lambda result: result.accuracy.get(name, {}).get(what)


def column(
    title: str,
    rows: Sequence[Sequence[Result]],
    value: Callable[[Result], float | None],
    show: Callable[[float], str] = _short,
    best: Callable | None = None,
    error: Callable[[Result], float | None] = lambda result: None,
) -> Column:
    """Return a column of means over the results of every row.

    If one is the best, each has the standard deviation of several results, or the standard `error` of a single one.
    """
    texts, means = [], []
    for row in rows:
        finished = [result for result in row if result.error is None and value(result) is not None]
        known = [value(result) for result in finished]
        means.append(sum(known) / len(known) if known else None)
        texts.append(show(means[-1]) if known else "-")
        if best and known and math.isfinite(means[-1]):
            deviation = statistics.stdev(known) if len(known) > 1 else error(finished[0])
            texts[-1] += "" if deviation is None else f" ± {show(deviation)}"
    return Column(title, texts, means, best)


def _lambdas(row: Sequence[Result]) -> str:
    """Return the chosen lambdas by step, in the order of the results, and why results are missing."""
    parts = list(dict.fromkeys(f"failed: {result.error}" for result in row if result.error is not None))
    for step in ("block", "row"):
        chosen = [getattr(result, f"{step}_lambda") for result in row]
        known = [f"{value:.2f}" if value == round(value, 2) else f"{value:g}" for value in chosen if value is not None]
        parts += [f"{step} {', '.join(known)}"] if known else []
    parts += dict.fromkeys(note for result in row if (note := result.decisions.get("note")))
    return "; ".join(parts)
