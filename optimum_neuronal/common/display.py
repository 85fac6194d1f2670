"""Tables, quantities and escaped text, for terminals and Markdown."""

import os
import re
from collections.abc import Collection, Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from tabulate import tabulate


BYTES = ((1e12, " TB"), (1e9, " GB"), (1e6, " MB"), (1e3, " kB"))
DURATIONS = ((3600, " hours"), (60, " minutes"))
VALUE = r"[-+]?[\d,]+(\.\d+)?(e[-+]\d+)?%?"
NUMBER = re.compile(f"{VALUE}( ± {VALUE})?")  # a version, 5.23.0, is text


def escaped(value: Any, longest: int | None = None) -> str:
    """Return the text of a value on one line, with unprintable characters escaped as in Python: `\\x1b`, `\\n`.

    So the content of a file cannot control a terminal or forge a line of a log. Text is cut after `longest` characters.
    """
    text = str(value)
    if longest is not None and len(text) > longest:
        text = f"{text[:longest]}... ({len(text):,} characters)"
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode("ascii") for sign in text)


def format_table(
    header: Sequence[str],
    rows: Sequence[Sequence[Any]],
    kind: str = "simple",
    bold: Collection[tuple[int, int]] = (),
) -> str:
    """Return a table of one of tabulate's kinds, by default for the terminal, with cells escaped and numbers to the right.

    `bold`: (row, column) of cells, from 0.
    """
    cells = [[escaped(cell) for cell in row] for row in rows]
    for row, column in bold:
        cells[row][column] = f"**{cells[row][column]}**"
    sides = ["right" if _holds_numbers(rows, column) else "left" for column in range(len(header))]
    options = {"disable_numparse": True, "colalign": sides if rows else None}
    return tabulate(cells, [escaped(name) for name in header], kind, **options)


def format_markdown(
    header: Sequence[str], rows: Sequence[Sequence[Any]], bold: Collection[tuple[int, int]] = ()
) -> str:
    """Return a table in Markdown, see [`format_table`]."""
    titles, *cells = [[str(cell).replace("|", "\\|") for cell in row] for row in (header, *rows)]
    return format_table(titles, cells, "pipe", bold)


def format_latex(header: Sequence[str], rows: Sequence[Sequence[Any]], bold: Collection[tuple[int, int]] = ()) -> str:
    """Return a table in LaTeX with the rules of booktabs, see [`format_table`]."""
    table = format_table(header, rows, "latex_booktabs", bold)
    return re.sub(r"\*\*(.+?)\*\*", r"\\textbf{\1}", table).replace("±", "$\\pm$")


def fold_rows(rows: Iterable[Sequence[str]]) -> list[list[str]]:
    """Return rows with each run of rows that are equal but for their first cell as one: `"blocks.0 to blocks.29"`."""
    runs = ([*run] for _, run in groupby(rows, key=lambda row: list(row[1:])))
    return [[f"{run[0][0]} to {run[-1][0]}" if len(run) > 1 else run[0][0], *run[0][1:]] for run in runs]


def _holds_numbers(rows: Sequence[Sequence[Any]], column: int) -> bool:
    cells = [cell for row in rows if (cell := str(row[column])) not in ("", "-")]
    return bool(cells) and all(map(NUMBER.fullmatch, cells))


def format_bytes(value: int) -> str:
    """Return a size: `1_234_567` -> `"1.23 MB"`; below a thousand `"12 bytes"`."""
    return _in_units(value, BYTES, 2) or f"{value} bytes"


def format_duration(seconds: float) -> str:
    """Return a duration: `90` -> `"1.5 minutes"`; below a minute `"12 seconds"`."""
    return _in_units(seconds, DURATIONS, 1) or f"{seconds:.2g} seconds"


def _in_units(value: float, units: Sequence[tuple[float, str]], digits: int) -> str | None:
    return next((f"{value / unit:.{digits}f}{name}" for unit, name in units if value >= unit), None)


def display_name(dataset: str) -> str:
    """Return the name of a dataset for a report, which is published, without folders of this machine."""
    # os.path.exists returns False for names that are too long and for paths that cannot be read.
    paths = [os.path.expanduser(dataset.rsplit(":", parts)[0]) for parts in range(3)]  # FILE:COLUMN:SHARE, or less
    return Path(dataset).name if any(os.path.exists(path) or os.path.isabs(path) for path in paths) else dataset
