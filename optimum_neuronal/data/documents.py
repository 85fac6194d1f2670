"""Text datasets of any kind, opened as lists of documents.

A dataset is a name in `CALIBRATION_DATASETS`; a Hub dataset, `"id"`, `"id:split"`, `"id:split:column"` or
`"id:config:split:column"`; a .txt, .csv, .jsonl (one object per line) or .parquet file, `"FILE"` or `"FILE:column"`; a
list of strings; a `datasets.Dataset`. Where no column is named it is `text`, else `messages`, else the only one of strings.
Entries may be conversations instead of texts, see `conversations`.
"""

import difflib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from .conversations import MESSAGES, Conversations, is_conversation
from .csv_files import read_csv
from .hub_datasets import CALIBRATION_DATASETS, HubDataset


ALTERNATIVES = "a local .txt, .csv, .jsonl or .parquet file, a list of strings, or token ids of shape (N, L)"


@dataclass(frozen=True)
class Documents(Sequence):
    """Texts, read when they are asked for. An entry that is no string raises `TypeError` with its index, a lone surrogate
    `ValueError`.

    Args:
        texts (`Sequence[str]`): a list, or the column of a `datasets.Dataset`.
        source (`str`): where they come from, for reports and errors; of a file, its name without its folder.
        separator (`str`): put between documents where they are joined.
        joined (`bool`): use them joined only, never one by one.
        max_windows (`int`): evaluate on so many windows at most.
        templated (`bool`): a chat template made the texts, so that they hold all special tokens.
    """

    texts: Sequence
    source: str
    separator: str = "\n\n"
    joined: bool = False
    max_windows: int | None = None
    templated: bool = False

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> str:
        return self._checked(index, self.texts[index])

    def __iter__(self) -> Iterator[str]:
        return (self._checked(index, text) for index, text in enumerate(self.texts))

    def join(self) -> str:
        """All documents as one text, with the separator between them."""
        return self.separator.join(self)

    def _checked(self, index: int, text: str) -> str:
        if not isinstance(text, str):
            kind = type(text).__name__
            raise TypeError(f"Document {index} of {self.source} is of type {kind}: every document has to be a string.")
        try:
            text.encode()
        except UnicodeEncodeError as error:  # JSON admits half of a pair as an escape
            raise ValueError(
                f"Document {index} of {self.source} is no text that tokenizers read: at character {error.start} is a lone "
                f"surrogate, {text[error.start]!r}. Take it out."
            ) from error
        return text


def load_documents(dataset, split: str = "train", tokenizer=None) -> Documents:
    """Finds and opens a text dataset.

    Args:
        dataset: any kind of text that this module's head lists.
        split (`"train"` or `"test"`): for a Hub dataset that names no split itself: the one to load.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): whose chat template makes text of conversations.

    Returns:
        [`Documents`]: at least one, at least one of them not blank.

    Raises:
        `RuntimeError`: a Hub dataset could not be loaded, e.g. without network.
        `FileNotFoundError`, `ValueError`, `TypeError`: no such file, name or column; no text; not text.
    """
    if isinstance(dataset, (str, os.PathLike)):
        documents = _from_name(os.fspath(dataset), split)
    elif isinstance(dataset, (list, tuple)):
        kind = "conversations" if dataset and is_conversation(dataset[0]) else "strings"
        documents = Documents(list(dataset), f"a list of {len(dataset)} {kind}", joined=len(dataset) == 1)
    else:
        documents = _from_dataset(dataset, None, "a datasets.Dataset")
    if _holds_conversations(documents):
        texts = Conversations(documents.texts, tokenizer, documents.source)
        documents = replace(documents, texts=texts, templated=True)
    return _with_text(documents)


def check_dataset(name: str, split: str = "train") -> None:
    """Raises what [`load_documents`] would, as far as that can be known without a download and a tokenizer.

    A file is read. Of a dataset on the Hub it is asked whether it exists and may be read; without a connection, whether it
    lies in the cache.

    Args:
        name (`str`), split (`"train"` or `"test"`): as for [`load_documents`].
    """
    documents = _from_name(name, split, _check_access)
    if documents is not None and not _holds_conversations(documents):
        _with_text(documents)


def _holds_conversations(documents: Documents) -> bool:
    return len(documents) > 0 and is_conversation(documents.texts[0])


def _with_text(documents: Documents) -> Documents:
    if isinstance(documents.texts, list):
        list(documents)  # in memory, so an entry that is no string can be known at once
    if not any(text.strip() for text in documents):
        what = "only blank documents" if len(documents) else "no documents"
        raise ValueError(f"The dataset ({documents.source}) holds {what}: pass one with text.")
    return documents


def _from_name(name: str, split: str, from_hub: Callable | None = None) -> Documents:
    from_hub = from_hub or _from_hub
    if name in CALIBRATION_DATASETS:
        return from_hub(CALIBRATION_DATASETS[name], name, split)
    head, _, tail = name.rpartition(":")
    has_column = Path(head).suffix.lower() in _READERS
    path, column = (head, tail) if has_column else (name, None)
    path = os.path.expanduser(path)
    suffix = Path(path).suffix.lower()
    if os.path.isdir(path) or (os.path.isfile(path) and suffix not in _READERS):
        kind = "folder" if os.path.isdir(path) else "file of an unknown kind"
        raise ValueError(f"The dataset {name!r} is a {kind}: pass one file that ends in {', '.join(_READERS)}.")
    if os.path.isfile(path):
        return _READERS[suffix](path, column)
    if suffix in _READERS:
        raise FileNotFoundError(f"The dataset file {path!r} does not exist: check its path.")
    return from_hub(_parse_hub_name(name), name, split)


def _parse_hub_name(name: str) -> HubDataset:
    hub_id, *parts = name.split(":")
    close = difflib.get_close_matches(hub_id.lower(), CALIBRATION_DATASETS, n=1)
    if close and "/" not in hub_id:
        raise ValueError(f"Unknown dataset {name!r}. Did you mean {close[0]!r}? Write a Hub id with its owner.")
    if len(parts) > 3 or not all(parts) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", hub_id):
        raise ValueError(
            f"The dataset {name[:80]!r} is neither a known name ({', '.join(CALIBRATION_DATASETS)}), a file that "
            "exists, nor a Hub dataset (id, id:split, id:split:column or id:config:split:column). To use a text "
            "itself, put it in a list."
        )
    config = parts.pop(0) if len(parts) == 3 else None
    spec = {"column": parts[1] if len(parts) == 2 else None}
    if parts:
        spec |= {"train_split": parts[0], "test_split": parts[0]}
    return HubDataset(hub_id, config, **spec)


def _from_hub(spec: HubDataset, name: str, role: str) -> Documents:
    import datasets

    test = role == "test"
    split, file = (spec.test_split, spec.test_file) if test else (spec.train_split, spec.train_file)
    files = {split: file} if file else None
    no_connection = _connection_error(spec.hub_id)
    try:
        with _offline_mode(no_connection is not None):
            data = datasets.load_dataset(
                spec.hub_id, spec.config, data_files=files, split=split, revision=spec.revision
            )
    except Exception as error:  # of many kinds: no network, no such id, config or split, gated, a full disk
        cause = no_connection or error
        raise _not_loaded(f"{name!r} ({spec.hub_id}, split {split!r})", cause, no_connection is not None) from cause
    if test and spec.test_documents:
        data = data.select(range(min(spec.test_documents, len(data))))
    source = f"{name} ({spec.hub_id}, split {split})"
    documents = _from_dataset(data, spec.column, source)
    return Documents(documents.texts, source, spec.separator, spec.joined, spec.test_windows if test else None)


def _not_loaded(dataset: str, cause: Exception, no_connection: bool = False) -> RuntimeError:
    reason = " ".join(str(cause).split())[:300].rstrip(".") or type(cause).__name__
    why = f"no connection to the Hub ({reason})" if no_connection else reason
    return RuntimeError(f"Could not load the dataset {dataset}: {why}. Pass {ALTERNATIVES}.")


def _check_access(spec: HubDataset, name: str, role: str) -> None:
    """Raises `RuntimeError` for a dataset that [`_from_hub`] could not load; downloads nothing."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    if _connection_error(spec.hub_id) is not None:
        _from_hub(spec, name, role)  # of the cache
        return
    try:
        HfApi().auth_check(spec.hub_id, repo_type="dataset")
    except RepositoryNotFoundError as error:  # or one that is gated, or private
        raise _not_loaded(f"{name!r} ({spec.hub_id})", error) from error


def _connection_error(hub_id: str) -> Exception | None:
    """Asks the Hub once, without the retries of a download, which last up to minutes when there is no network."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        HfApi().dataset_info(hub_id, timeout=10)
    except HfHubHTTPError:  # the Hub answered; what it refuses, load_dataset explains
        return None
    except Exception as error:
        return error
    return None


@contextmanager
def _offline_mode(enabled: bool) -> Iterator[None]:
    """Lets `datasets` use its cache only, so that what was loaded before still works without network."""
    from datasets import config

    before = config.HF_HUB_OFFLINE
    config.HF_HUB_OFFLINE = before or enabled
    try:
        yield
    finally:
        config.HF_HUB_OFFLINE = before


def _from_dataset(data, column: str | None, source: str) -> Documents:
    import datasets

    if not isinstance(data, datasets.Dataset):
        raise TypeError(
            f"A dataset of type {type(data).__name__} is not supported. Pass a name, {ALTERNATIVES}, or one split "
            "of a datasets.Dataset."
        )
    column = _text_column(data.column_names, _strings(data.features), column, source)
    return Documents(data[column], f"{source}, column {column}")


def _strings(features: Mapping) -> list[str]:
    """Names of the columns of strings."""
    return [name for name, kind in features.items() if str(getattr(kind, "dtype", "")).endswith("string")]


def _text_column(names: Iterable[str], strings: Sequence[str], column: str | None, source: str) -> str:
    """The column that was asked for; else `text`, `messages`, or the only one of strings."""
    names = list(names)
    if column is None:
        only = strings if len(strings) == 1 else []
        column = next((name for name in ("text", MESSAGES, *only) if name in names), "text")
    if column not in names:
        raise ValueError(f"The dataset ({source}) has no column {column!r}, it has: {', '.join(names)}.")
    return column


def _read_txt(path: str, column: str | None) -> Documents:
    if column is not None:
        raise ValueError(f"The text file {path!r} has no column {column!r}: leave {':' + column!r} away.")
    try:
        return Documents([Path(path).read_text(encoding="utf-8-sig")], Path(path).name, joined=True)
    except UnicodeDecodeError as error:
        raise ValueError(f"The file {path!r} is not UTF-8 text ({error.reason}): convert it.") from error


def _read_csv(path: str, column: str | None) -> Documents:
    columns, name = read_csv(path), Path(path).name
    column = _text_column(columns, list(columns), column, name)
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
        column = _text_column(features, _strings(features), column, name)
        try:
            data = Dataset(InMemoryTable(parquet.read([column])))
        except Exception as error:
            raise _not_parquet(path, error) from error
    return _from_dataset(data, column, name)


def _not_parquet(path: str, error: Exception) -> ValueError:
    return ValueError(f"The file {path!r} could not be read as parquet: {error}.")


_READERS = {".txt": _read_txt, ".csv": _read_csv, ".jsonl": _read_jsonl, ".parquet": _read_parquet}
FILE_SUFFIXES = tuple(_READERS)
