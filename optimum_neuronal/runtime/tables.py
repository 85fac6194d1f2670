"""Tables for the terminal."""

import re
from collections.abc import Callable, Sequence
from typing import Any

from .escaping import escaped


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


def _is_number(cell: str) -> bool:
    return re.fullmatch(r"-?[\d,]+(\.\d+)?%?", cell) is not None  # not a version: 5.23.0
