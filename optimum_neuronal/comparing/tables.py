"""Tables of a comparison as text, with the best of every column marked."""

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from ..display import Cell
from .results import DENSE, Aggregate, Result, bits_text


class Table(NamedTuple):
    """Arguments of `format_table`, `format_markdown` and `format_html` of `display`.

    Args:
        header (`list[str]`), rows (`list[list[str]]`): text.
        bold (`frozenset[tuple[int, int]]`): row and column of the best.
    """

    header: list[str]
    rows: list[list[str]]
    bold: frozenset[Cell]


class Column(NamedTuple):
    """Column of a table: its title, the text of an entry, and for measured columns the value and the function of the best."""

    title: str
    text: Callable[[Any], str]
    value: Callable[[Any], float | None] = lambda entry: None
    best: Callable[[Iterable[float]], float] = min


def combination_table(dense: Result, results: Sequence[Result]) -> Table:
    """Return a table with a row per combination below the dense model's row.

    The best of every sparsity and number of bits is marked. Columns of bits are left out if no result has bits.
    """
    shown = [dense, *results]
    columns = [
        Column("sparsity", lambda r: f"{r.achieved_sparsity if r.error is None else r.sparsity:.2%}"),
        Column("saliency", lambda r: r.saliency),
        Column("top-up", lambda r: "-" if r.saliency == DENSE else r.topup),
    ]
    if any(result.value_bits is not None for result in shown):
        columns.append(Column("value bits", lambda r: "-" if r.value_bits is None else str(r.value_bits)))
    if any(result.bits_per_weight is not None for result in shown):
        columns.append(Column("bits a weight", lambda r: "-" if r.bits_per_weight is None else f"{r.bits_per_weight:.2f}"))
    columns += [_measured(f"perplexity {name}", _perplexity(name), _short, min) for name in dense.perplexity]
    columns += [_accuracy(name) for name in dense.accuracy]
    if dense.accuracy:
        columns.append(_measured("mean accuracy", lambda r: r.mean_accuracy, "{:.2%}".format, max))
    columns += [
        _cost("allocation s", lambda r: f"{r.allocation_seconds:.1f}"),
        _cost("pruning s", lambda r: f"{r.pruning_seconds:.1f}"),
        _cost("peak GB", lambda r: f"{max(r.peak_memory.values(), default=0) / 1e9:.2f}"),
        Column("lambda block / row", _lambdas),
    ]
    groups: dict[tuple[float, int | None], list[int]] = {}
    for row, result in enumerate(results, 1):
        groups.setdefault((result.sparsity, result.value_bits), []).append(row)
    return _table(columns, shown, groups.values())


def aggregate_table(aggregates: Sequence[Aggregate], with_tasks: bool) -> Table:
    """Return a table with a row per top-up and a column per sparsity, bits and aggregate; the best is marked."""
    targets = list(dict.fromkeys((entry.sparsity, entry.value_bits) for entry in aggregates))
    topups = list(dict.fromkeys(entry.topup for entry in aggregates))
    found = {(entry.topup, entry.sparsity, entry.value_bits): entry for entry in aggregates}

    def measured(title: str, target: tuple[float, int | None], name: str, text: Callable, best: Callable) -> Column:
        def value(topup: str) -> float | None:  # None while the comparison runs, or if all combinations failed
            return getattr(found.get((topup, *target)), name, None)

        return _measured(f"{title}, {target[0]:.0%}{bits_text(target[1])}", value, text, best)

    columns = [Column("top-up", str)]
    columns += [measured("perplexity x dense", target, "perplexity_factor", _short, min) for target in targets]
    if with_tasks:
        per_cent = "{:.1%}".format
        columns += [measured("accuracy retained", target, "accuracy_retention", per_cent, max) for target in targets]
    return _table(columns, topups, [range(len(topups))])


def to_csv(dense: Result, results: Sequence[Result]) -> str:
    """Return one line of CSV per combination, in full precision."""
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


def _table(columns: Sequence[Column], entries: Sequence, groups: Iterable[Sequence[int]]) -> Table:
    """Return the table of entries. In every group of rows, the best of every measured column is bold.

    Entries that look like the best are bold too. A group with a single value has no best.
    """
    bold = set()
    for rows in groups:
        for number, column in enumerate(columns):
            values = {row: value for row in rows if (value := column.value(entries[row])) is not None}
            if len(values) > 1:
                best = column.best(values.values())
                text = next(column.text(entries[row]) for row, value in values.items() if value == best)
                bold |= {(row, number) for row in values if column.text(entries[row]) == text}
    rows = [[column.text(entry) for column in columns] for entry in entries]
    return Table([column.title for column in columns], rows, frozenset(bold))


def _measured(title: str, value: Callable, text: Callable[[float], str], best: Callable) -> Column:
    """Return a column of values, `"-"` where there is none."""

    def cell(entry: Any) -> str:
        return "-" if value(entry) is None else text(value(entry))

    return Column(title, cell, value, best)


def _perplexity(name: str) -> Callable[[Result], float | None]:
    return lambda result: result.perplexity.get(name)


def _accuracy(name: str) -> Column:
    def text(result: Result) -> str:
        task = result.accuracy.get(name)
        if task is None:
            return "-"
        return f"{task['accuracy']:.2%}" + (f" ± {task['stderr']:.2%}" if task.get("stderr") is not None else "")

    return Column(name, text, lambda result: result.accuracy.get(name, {}).get("accuracy"), max)


def _cost(title: str, text: Callable[[Result], str]) -> Column:
    """Return a column of costs, empty for the dense model."""

    def cell(result: Result) -> str:
        return "-" if result.error is not None else "" if result.saliency == DENSE else text(result)

    return Column(title, cell)


def _lambdas(result: Result) -> str:
    if result.error is not None:
        return f"failed: {result.error}"
    return " / ".join(f"{value:g}" for value in (result.block_lambda, result.row_lambda) if value is not None)


def _short(value: float) -> str:
    return f"{value:.2f}" if value < 10000 else f"{value:.2e}"
