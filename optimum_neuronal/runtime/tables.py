"""Tables for the terminal."""

import re
from collections.abc import Sequence
from typing import Any

from .escaping import escaped


def format_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Lines of a table with aligned columns: numbers to the right, text to the left. A cell is one line: see [`escaped`]."""
    cells = [[escaped(cell) for cell in row] for row in [header, *rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]

    def line(row: Sequence[str]) -> str:
        padded = [cell.rjust(width) if _is_number(cell) else cell.ljust(width) for cell, width in zip(row, widths)]
        return "  ".join(padded).rstrip()

    return "\n".join([line(cells[0]), "  ".join("-" * width for width in widths), *map(line, cells[1:])])


def _is_number(cell: str) -> bool:
    return re.fullmatch(r"-?[\d,]+(\.\d+)?%?", cell) is not None  # not a version: 5.23.0
