"""Tables of a comparison as text, with the best of every column marked."""

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from ..display import Cell
from .results import DENSE, Aggregate, Result, bits_text


class Table(NamedTuple):
    """Arguments of `format_table`, `format_markdown` and `format_html` of `display`; `bold` are the best cells."""

    header: list[str]
    rows: list[list[str]]
    bold: frozenset[Cell]


class Column(NamedTuple):
    """Column of a table. Measured columns have values, of which `best` finds the best; None: there is no value."""

    title: str
    cells: Sequence[str]
    values: Sequence[float | None] = ()
    best: Callable[[Iterable[float]], float] = min


def combination_table(dense: Result, results: Sequence[Result]) -> Table:
    """Return a table with a row per combination below the dense model's row.

    The best of every sparsity and number of bits is marked. Columns of bits are left out if no result has bits.
    """
    shown = [dense, *results]
    columns = [
        Column("sparsity", [f"{r.sparsity if r.error else r.achieved_sparsity:.2%}" for r in shown]),
        Column("saliency", [r.saliency for r in shown]),
        Column("top-up", ["-" if r.saliency == DENSE else r.topup for r in shown]),
    ]
    if any(r.value_bits is not None for r in shown):
        columns.append(Column("value bits", ["-" if r.value_bits is None else str(r.value_bits) for r in shown]))
    if any(r.bits_per_weight is not None for r in shown):
        columns.append(Column("bits a weight", _texts([r.bits_per_weight for r in shown], "{:.2f}".format)))
    for name in dense.perplexity:
        columns.append(_measured(f"perplexity {name}", [r.perplexity.get(name) for r in shown], _short, min))
    for name in dense.accuracy:
        tasks = [r.accuracy.get(name, {}) for r in shown]
        columns.append(
            Column(name, [_accuracy(task) for task in tasks], [task.get("accuracy") for task in tasks], max)
        )
    if dense.accuracy:
        columns.append(_measured("mean accuracy", [r.mean_accuracy for r in shown], "{:.2%}".format, max))
    costs = {
        "allocation s": lambda r: f"{r.allocation_seconds:.1f}",
        "pruning s": lambda r: f"{r.pruning_seconds:.1f}",
        "peak GB": lambda r: f"{max(r.peak_memory.values(), default=0) / 1e9:.2f}",
    }
    for title, text in costs.items():
        columns.append(Column(title, ["-" if r.error else "" if r.saliency == DENSE else text(r) for r in shown]))
    columns.append(Column("lambda block / row", [_lambdas(r) for r in shown]))
    groups: dict[tuple[float, int | None], list[int]] = {}
    for row, result in enumerate(results, 1):
        groups.setdefault((result.sparsity, result.value_bits), []).append(row)
    return _table(columns, groups.values())


def aggregate_table(aggregates: Sequence[Aggregate], with_tasks: bool) -> Table:
    """Return a table with a row per top-up and a column per sparsity, bits and aggregate; the best is marked."""
    targets = list(dict.fromkeys((entry.sparsity, entry.value_bits) for entry in aggregates))
    topups = list(dict.fromkeys(entry.topup for entry in aggregates))
    found = {(entry.topup, entry.sparsity, entry.value_bits): entry for entry in aggregates}
    measures: list[tuple] = [("perplexity x dense", "perplexity_factor", _short, min)]
    if with_tasks:
        measures.append(("accuracy retained", "accuracy_retention", "{:.1%}".format, max))
    columns = [Column("top-up", topups)]
    for title, attribute, text, best in measures:
        for target in targets:
            # None while the comparison runs, or if all combinations failed
            values = [getattr(found.get((topup, *target)), attribute, None) for topup in topups]
            columns.append(_measured(f"{title}, {target[0]:.0%}{bits_text(target[1])}", values, text, best))
    return _table(columns, [range(len(topups))])


def to_csv(dense: Result, results: Sequence[Result]) -> str:
    """Return one line of CSV per combination, in full precision."""
    columns = ["saliency", "topup", "sparsity", "achieved_sparsity", "allocation_seconds", "pruning_seconds"]
    columns += ["block_lambda", "row_lambda", "value_bits", "bits_per_weight", "error"]
    rows = []
    for result in [dense, *results]:
        row = {column: getattr(result, column) for column in columns}
        row["peak_memory"] = max(result.peak_memory.values(), default=None)
        row |= {f"perplexity {name}": result.perplexity.get(name) for name in dense.perplexity}
        for kind in ("accuracy", "stderr"):
            row |= {f"{kind} {name}": result.accuracy.get(name, {}).get(kind) for name in dense.accuracy}
        rows.append(row)
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _table(columns: Sequence[Column], groups: Iterable[Sequence[int]]) -> Table:
    """Return a table of columns. In every group of rows, the best of every measured column is bold.

    Cells that look like the best are bold too. A group with a single value has no best.
    """
    bold = set()
    for rows in groups:
        for number, column in enumerate(columns):
            values = {row: value for row in rows if column.values and (value := column.values[row]) is not None}
            if len(values) > 1:
                best = column.best(values.values())
                text = next(column.cells[row] for row, value in values.items() if value == best)
                bold |= {(row, number) for row in values if column.cells[row] == text}
    rows = [list(row) for row in zip(*(column.cells for column in columns))]
    return Table([column.title for column in columns], rows, frozenset(bold))


def _measured(title: str, values: Sequence[float | None], text: Callable[[float], str], best: Callable) -> Column:
    return Column(title, _texts(values, text), values, best)


def _texts(values: Sequence[Any], text: Callable[[float], str]) -> list[str]:
    return ["-" if value is None else text(value) for value in values]


def _accuracy(task: dict[str, Any]) -> str:
    if not task:
        return "-"
    return f"{task['accuracy']:.2%}" + (f" ± {task['stderr']:.2%}" if task.get("stderr") is not None else "")


def _lambdas(result: Result) -> str:
    if result.error is not None:
        return f"failed: {result.error}"
    return " / ".join(f"{value:g}" for value in (result.block_lambda, result.row_lambda) if value is not None)


def _short(value: float) -> str:
    return f"{value:.2f}" if value < 10000 else f"{value:.2e}"
