"""Tables for the terminal, for Markdown and for notebooks."""

import html
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

from .escaping import escaped


Cell = tuple[int, int]  # row and column, from 0, the header not counted


def format_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Lines of a table with aligned columns: numbers to the right, text to the left. A cell is one line: see [`escaped`]."""
    cells = [[escaped(cell) for cell in row] for row in [header, *rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    return "\n".join([*_head(cells[0], widths), *(_line(row, widths) for row in cells[1:])])


class GrowingTable:
    """The same table, whose rows are written as soon as they are known.

    Args:
        header (`Sequence[str]`): names of the columns; written at once.
        longest (`Sequence[str]`): the longest cell that each column may get; longer ones push what follows.
        write: receives every line.
    """

    def __init__(self, header: Sequence[str], longest: Sequence[str], write: Callable[[str], None]):
        self.widths, self.write = [max(map(len, cells)) for cells in zip(header, longest)], write
        for line in _head(header, self.widths):
            write(line)

    def add(self, row: Sequence[Any]) -> None:
        """Writes a row."""
        self.write(_line([escaped(cell) for cell in row], self.widths))


def _head(header: Sequence[str], widths: Sequence[int]) -> list[str]:
    return [_line(header, widths), "  ".join("-" * width for width in widths)]


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    padded = [cell.rjust(width) if _is_number(cell) else cell.ljust(width) for cell, width in zip(row, widths)]
    return "  ".join(padded).rstrip()


def format_markdown(header: Sequence[str], rows: Sequence[Sequence[Any]], bold: Collection[Cell] = ()) -> str:
    """A table in Markdown, columns of numbers to the right."""
    lines = [[escaped(cell).replace("|", "\\|") for cell in row] for row in [header, *rows]]
    for row, column in bold:
        lines[1 + row][column] = f"**{lines[1 + row][column]}**"
    rules = ["---:" if _is_of_numbers(rows, column) else "---" for column in range(len(header))]
    return "\n".join("| " + " | ".join(line) + " |" for line in [lines[0], rules, *lines[1:]])


def format_html(header: Sequence[str], rows: Sequence[Sequence[Any]], bold: Collection[Cell] = ()) -> str:
    """A table in HTML, columns of numbers to the right."""
    right = [_is_of_numbers(rows, column) for column in range(len(header))]

    def line(tag: str, number: int, row: Sequence[Any]) -> str:
        cells = [html.escape(escaped(cell)) for cell in row]
        cells = [f"<b>{cell}</b>" if (number, column) in bold else cell for column, cell in enumerate(cells)]
        sides = ["right" if side else "left" for side in right]
        return "".join(f'<{tag} style="text-align: {side}">{cell}</{tag}>' for side, cell in zip(sides, cells))

    body = "".join(f"<tr>{line('td', number, row)}</tr>\n" for number, row in enumerate(rows))
    return f"<table>\n<thead><tr>{line('th', -1, header)}</tr></thead>\n<tbody>\n{body}</tbody>\n</table>"


def _is_of_numbers(rows: Sequence[Sequence[Any]], column: int) -> bool:
    cells = [cell for row in rows if (cell := str(row[column])) not in ("", "-")]
    return bool(cells) and all(map(_is_number, cells))


def _is_number(cell: str) -> bool:
    return re.fullmatch(r"-?[\d,]+(\.\d+)?%?", cell) is not None  # not a version: 5.23.0
