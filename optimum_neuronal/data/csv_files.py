"""Tables in CSV files: a header, then rows, as spreadsheets write them."""

import csv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


LONGEST = 2**31 - 1  # characters of a field; the csv module's own limit is less than many a document


def read_csv(path: str | Path) -> dict[str, list[str]]:
    """The columns of a file by their names, in order.

    Args:
        path (`str` or `Path`): of a file in UTF-8, separated by commas, whose first line names the columns.

    Raises:
        `ValueError`: no UTF-8, no header, a row of another length than the header, or quotes that do not close.
    """
    try:
        with open(path, encoding="utf-8-sig", newline="") as file, _long_fields():
            rows = csv.reader(file, strict=True)
            header = next(rows, [])
            columns: dict[str, list[str]] = {name: [] for name in header}
            if len(columns) < max(1, len(header)):
                raise ValueError(
                    f"The file {str(path)!r} has no header of different names in its first line: add one."
                )
            for row in rows:
                if row and len(row) != len(header):
                    raise ValueError(
                        f"Line {rows.line_num} of {str(path)!r} ends a row of {len(row)} fields, where the header names "
                        f"{len(header)}: put text with commas in quotes."
                    )
                for name, field in zip(header, row):
                    columns[name].append(field)
    except UnicodeDecodeError as error:
        raise ValueError(f"The file {str(path)!r} is not UTF-8 text ({error.reason}): convert it.") from error
    except csv.Error as error:
        raise ValueError(f"The file {str(path)!r} could not be read as CSV: {error}.") from error
    return columns


@contextmanager
def _long_fields() -> Iterator[None]:
    """The limit of a field's length is one for all readers of the process."""
    before = csv.field_size_limit(LONGEST)
    try:
        yield
    finally:
        csv.field_size_limit(before)
