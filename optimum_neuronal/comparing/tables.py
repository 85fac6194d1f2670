"""Tables of a comparison as text, with the best of every column marked."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

from ..display import Cell


class Table(NamedTuple):
    """Arguments of `format_table`, `format_markdown` and `format_html` of `display`; `bold` are the best cells."""

    header: list[str]
    rows: list[list[str]]
    bold: frozenset[Cell]


class Column(NamedTuple):
    """Column of a table: a value for each row, None if there is none, the text of a value, and how to find the best."""

    title: str
    values: Sequence[Any]
    text: Callable[[Any], str] = str
    best: Callable[[Iterable[Any]], Any] | None = None


def make_table(columns: Sequence[Column], groups: Sequence[Hashable]) -> Table:
    """Return a table of columns. In every group of rows, the best of every column that has a best is bold.

    `groups` has the group of every row; None: no group. Cells that look like the best are bold too. A group with a single
    value has no best.
    """
    cells = [["-" if value is None else column.text(value) for value in column.values] for column in columns]
    bold = set()
    for group in {*groups} - {None}:
        for number, column in enumerate(columns):
            values = {
                row: value for row, value in enumerate(column.values) if groups[row] == group and value is not None
            }
            if column.best is not None and len(values) > 1:
                best = column.text(column.best(values.values()))
                bold |= {(row, number) for row in values if cells[number][row] == best}
    return Table([column.title for column in columns], [list(row) for row in zip(*cells)], frozenset(bold))


def short(value: float) -> str:
    """Return a perplexity or a factor with two decimals, as a power of ten from 10,000."""
    return f"{value:.2f}" if value < 10000 else f"{value:.2e}"


def accuracy_text(task: dict[str, Any]) -> str:
    """Return a task's accuracy with its standard error, as far as there is one: `"60.00% ± 1.00%"`."""
    return f"{task['accuracy']:.2%}" + (f" ± {task['stderr']:.2%}" if task.get("stderr") is not None else "")
