"""Text files of the kinds that are understood, as lists of documents: `READERS`, by what their names end with."""

import json
from pathlib import Path

from .conversations import MESSAGES
from .csv_files import read_csv
from .texts import Documents, from_dataset, string_columns, text_column


def _read_txt(path: str, column: str | None) -> Documents:
    if column is not None:
        raise ValueError(f"The text file {path!r} has no column {column!r}: leave {':' + column!r} away.")
    try:
        return Documents([Path(path).read_text(encoding="utf-8-sig")], Path(path).name, joined=True)
    except UnicodeDecodeError as error:
        raise ValueError(f"The file {path!r} is not UTF-8 text ({error.reason}): convert it.") from error


def _read_csv(path: str, column: str | None) -> Documents:
    columns, name = read_csv(path), Path(path).name
    column = text_column(columns, list(columns), column, name)
    return Documents(columns[column], f"{name}, column {column}")


def _read_jsonl(path: str, column: str | None) -> Documents:
    texts = []
    for number, line in enumerate(_read_txt(path, None)[0].split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except RecursionError as error:
            raise ValueError(
                f"Line {number} of {path!r} is nested too deeply: expected one object with text."
            ) from error
        except ValueError as error:
            raise ValueError(f"Line {number} of {path!r} is not JSON: {error}. One object per line.") from error
        if column is None and isinstance(record, dict):
            column = (
                MESSAGES if MESSAGES in record and "text" not in record else "text"
            )  # of all lines as of the first
        if not isinstance(record, dict) or column not in record:
            found = f"keys {', '.join(record)}" if isinstance(record, dict) else type(record).__name__
            wanted = column or "text"
            raise ValueError(f"Line {number} of {path!r} is no object with the key {wanted!r}, it is: {found}.")
        texts.append(record[column])
    return Documents(texts, Path(path).name)


def _read_parquet(path: str, column: str | None) -> Documents:
    """Of this very file, as it is now: `datasets` would take its name for a pattern, and its time for its content."""
    from datasets import Dataset, Features
    from datasets.table import InMemoryTable
    from pyarrow.parquet import ParquetFile

    name = Path(path).name
    with open(path, "rb") as file:
        try:
            parquet = ParquetFile(file)
            features = Features.from_arrow_schema(parquet.schema_arrow)
        except Exception as error:  # pyarrow's and datasets' own, and OSError
            raise _not_parquet(path, error) from error
        column = text_column(features, string_columns(features), column, name)
        try:
            data = Dataset(InMemoryTable(parquet.read([column])))
        except Exception as error:
            raise _not_parquet(path, error) from error
    return from_dataset(data, column, name)


def _not_parquet(path: str, error: Exception) -> ValueError:
    return ValueError(f"The file {path!r} could not be read as parquet: {error}.")


# Ending -> what reads a file, given its path and the column, if one is named.
READERS = {".txt": _read_txt, ".csv": _read_csv, ".jsonl": _read_jsonl, ".parquet": _read_parquet}
FILE_SUFFIXES = tuple(READERS)
