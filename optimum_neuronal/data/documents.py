"""Opens text datasets of any kind as documents.

A dataset is one of:

- a name in `CALIBRATION_DATASETS`;
- a Hub dataset: `"id"`, `"id:split"`, `"id:split:column"` or `"id:config:split:column"`;
- a file of text or a .csv, .json, .jsonl or .parquet file, or a folder of one kind of them: `"PATH"` or `"PATH:column"`;
- a list of strings or conversations, one split of a `datasets.Dataset`, a column of it, or a `datasets.IterableDataset`.

If no column is named it is `text`, else `messages`, `conversations`, or `prompt` with `completion`, else the only column of
strings. Conversations are lists of messages, with `role` and `content` or ShareGPT's `from` and `value`. The tokenizer's
chat template renders them.
"""

import glob
import itertools
import json
import os
import random
import re
import textwrap
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import LocalEntryNotFoundError

from ..common.connection import check_connection
from ..common.notes import get_logger
from ..common.validation import did_you_mean
from .conversations import PAIR, are_conversations, find_template, render


logger = get_logger(__name__)

BUILDERS = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}  # suffix -> loader of `datasets`
TEXT_SUFFIXES = (".txt", ".text", ".raw", ".tokens", ".md")
FILE_SUFFIXES = (*TEXT_SUFFIXES, *BUILDERS)
README = "README.md"  # describes a folder and is not part of its text
ALTERNATIVES = f"a local {', '.join(FILE_SUFFIXES)} file, a list of strings, or token ids of shape (N, L)"
NAMED = "Name one after a colon: NAME:COLUMN"
STREAM_DOCUMENTS = 10_000  # read from a stream, to draw calibration sequences or to test


@dataclass(frozen=True)
class TextDataset:
    """Arguments of `datasets.load_dataset` for a text dataset, and how the literature uses it."""

    path: str
    config: str | None = None
    splits: tuple[str, str] = ("train", "test")  # for calibration and for evaluation
    files: tuple[str | None, str | None] = (None, None)  # the same; with a Hub dataset, in its repository
    revision: str | None = None
    column: str | None = None
    separator: str = "\n\n"
    joined: bool = False  # True: documents such as lines, which make sense only together
    test_documents: int | None = None  # the most documents and windows of an evaluation
    test_windows: int | None = None
    shards: int = 1  # files that the text to train on is split into; `files` names the first


CALIBRATION_DATASETS = {
    "c4": TextDataset(
        "allenai/c4",
        splits=("train", "validation"),
        files=("en/c4-train.00000-of-01024.json.gz", "en/c4-validation.00000-of-00008.json.gz"),
        separator=" ",
        test_documents=1100,
        test_windows=256,
        shards=1024,
    ),
    "wikitext2": TextDataset(
        "Salesforce/wikitext",
        files=("wikitext-2-raw-v1/train-00000-of-00001.parquet", "wikitext-2-raw-v1/test-00000-of-00001.parquet"),
        joined=True,
    ),
    # Its repository holds a loading script, which datasets no longer runs. The Hub's conversion holds the data.
    "ptb": TextDataset(
        "ptb-text-only/ptb_text_only",
        files=("penn_treebank/train/0000.parquet", "penn_treebank/test/0000.parquet"),
        revision="refs/convert/parquet",
        column="sentence",
        separator=" ",
        joined=True,
    ),
}


@dataclass(frozen=True)
class Documents(Sequence):
    """Texts that are read on demand. None counts as an empty text; other entries raise an error with their index."""

    entries: Sequence
    source: str  # for reports and errors; of a file, its name without the folder
    separator: str = "\n\n"
    joined: bool = False
    max_windows: int | None = None
    # The tokenizer or processor whose chat template renders the entries, if they are conversations.
    template: Any = field(default=None, repr=False)

    @property
    def rendered(self) -> bool:
        """True if a chat template rendered the texts: it has its own BOS, so tokenize them without special tokens."""
        return self.template is not None

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: int) -> str:
        return self.text_of(index, self.entries[index])

    def __iter__(self) -> Iterator[str]:
        return (self.text_of(index, entry) for index, entry in enumerate(self.entries))

    def join(self) -> str:
        return self.separator.join(self)

    def text_of(self, index: int, entry: Any) -> str:
        if entry is None:
            return ""
        if self.rendered:
            return render(entry, self.template, f"document {index} of {self.source}")
        if not isinstance(entry, str):
            raise TypeError(
                f"Document {index} of {self.source} is a {type(entry).__name__}: expected a string, or messages."
            )
        return entry


@dataclass(frozen=True)
class TextStream:
    """Texts to train on, read on demand. It ends when the dataset does."""

    texts: Iterator[str]
    source: str  # for reports
    rendered: bool  # as of `Documents`


def load_documents(dataset: Any, split: str = "train", tokenizer: Any = None) -> Documents:
    """Open a text dataset of any kind that this module's docstring lists; raise if it holds no text.

    `split` is `"train"` or `"test"`, for datasets that do not name one. Conversations need a tokenizer, or processor, with
    a chat template. Of a `datasets.IterableDataset`, the first `STREAM_DOCUMENTS` documents are read.
    """
    if isinstance(dataset, (str, os.PathLike)):
        documents = _load(os.fspath(dataset), find_dataset(os.fspath(dataset)), split == "test")
    elif isinstance(dataset, Sequence):  # also a column of a datasets.Dataset
        kind = "conversations" if are_conversations(dataset) else "strings"
        documents = Documents(list(dataset), f"a list of {len(dataset)} {kind}", joined=len(dataset) == 1)
        _note_nulls(documents, sum(entry is None for entry in dataset))
    else:
        documents = _column(*_in_memory(dataset, STREAM_DOCUMENTS))
    return _readable(documents, tokenizer)


def iterate_documents(dataset: Any, seed: int, tokenizer: Any = None) -> TextStream:
    """Open a dataset of any kind that [`load_documents`] takes, to train on all of its text once.

    The seed decides the order of the documents. A `datasets.IterableDataset` keeps its own. Lines (wikitext2, ptb, .txt)
    are joined to one text. The files of "c4" are read one after the other. Empty texts are left out.
    """
    import datasets

    if not isinstance(dataset, datasets.IterableDataset):
        documents = load_documents(dataset, tokenizer=tokenizer)
        if documents.rendered:
            deque(documents, maxlen=0)  # raises for a conversation that cannot be rendered, before the training
        texts = _shuffled(documents, _next_files(dataset, tokenizer), random.Random(seed))
        return TextStream(filter(str.strip, texts), documents.source, documents.rendered)
    head, *how = _in_memory(dataset, 100)
    documents, columns = _readable(_column(head, *how), tokenizer), _find_columns(head, *how)
    documents = replace(documents, source="a datasets.IterableDataset")
    entries = (row[columns[0]] if len(columns) == 1 else row for row in dataset)
    texts = (documents.text_of(index, entry) for index, entry in enumerate(entries))
    return TextStream(filter(str.strip, texts), documents.source, documents.rendered)


def _shuffled(documents: Documents, others: Iterable[Documents], rng: random.Random) -> Iterator[str]:
    for part in itertools.chain([documents], others):
        if part.joined:
            yield part.join()
        else:
            yield from (part[index] for index in rng.sample(range(len(part)), len(part)))


def _next_files(name: Any, tokenizer: Any) -> Iterator[Documents]:
    """Yield the documents of each further file of a named dataset, until one cannot be loaded."""
    dataset = CALIBRATION_DATASETS.get(name) if isinstance(name, str) else None
    for number in range(1, dataset.shards if dataset else 1):
        file = dataset.files[0].replace("00000-of", f"{number:05}-of")
        try:
            documents = _load(name, replace(dataset, files=(file, None)), test=False)
        except RuntimeError as error:
            logger.warning(f"The text of {name} ends after {number} of {dataset.shards} files. {error}")
            return
        yield _readable(documents, tokenizer)


def _readable(documents: Documents, tokenizer: Any) -> Documents:
    """Return documents with the template that renders them, if they are conversations. Raise if they hold no text."""
    if are_conversations(documents.entries):
        documents = replace(documents, separator="", template=find_template(tokenizer, documents.source))
    if not any(text.strip() for text in documents):
        raise ValueError(f"The dataset ({documents.source}) holds no text.")
    return documents


def check_datasets(datasets: Iterable[Any]) -> None:
    """Raise `FileNotFoundError` or `ValueError` for names and paths of datasets that cannot be right. Open nothing."""
    for dataset in datasets:
        if isinstance(dataset, (str, os.PathLike)):
            find_dataset(os.fspath(dataset))


def find_dataset(name: str) -> TextDataset:
    """Return how to load a named dataset, or raise `FileNotFoundError` or `ValueError`. Open nothing."""
    if name in CALIBRATION_DATASETS:
        return CALIBRATION_DATASETS[name]
    path, column = os.path.expanduser(name), None
    head, _, tail = path.rpartition(":")
    if not os.path.exists(path) and (head.lower().endswith(FILE_SUFFIXES) or os.path.isdir(head)):
        path, column = head, tail
    suffix = Path(path).suffix.lower()
    if os.path.isdir(path) and _holds_data(path):
        return TextDataset(os.path.abspath(path), column=column)
    if os.path.isdir(path) or (os.path.isfile(path) and suffix in FILE_SUFFIXES):
        builder = BUILDERS.get(suffix, "txt") if os.path.isfile(path) else "txt"
        if builder == "txt" and column is not None:
            raise ValueError(f"{path!r} is text, which has no columns: leave out {':' + column!r}.")
        return TextDataset(builder, files=(path, path), column=column)
    if suffix in FILE_SUFFIXES or path.startswith((".", os.sep)) or os.path.isfile(path):
        raise FileNotFoundError(f"The dataset {path!r} does not exist, or does not end in {', '.join(FILE_SUFFIXES)}.")
    hub_id, *parts = name.split(":")
    hint = "" if "/" in hub_id else did_you_mean(hub_id.lower(), CALIBRATION_DATASETS)
    if hint or len(parts) > 3 or not all(parts) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", hub_id):
        raise ValueError(
            f"The dataset {name[:80]!r} is not a known name ({', '.join(CALIBRATION_DATASETS)}), a file, or a Hub dataset "
            f"(OWNER/ID, with :SPLIT, :SPLIT:COLUMN or :CONFIG:SPLIT:COLUMN).{hint} To use a text itself, put it in a list."
        )
    config = parts.pop(0) if len(parts) == 3 else None
    splits = (parts[0], parts[0]) if parts else ("train", "test")
    return TextDataset(hub_id, config, splits, column=parts[1] if len(parts) == 2 else None)


def _holds_data(path: str) -> bool:
    """Return True for a folder of data files, which `datasets` reads, and False for one of text. Raise for any other."""
    suffixes = sorted({file.suffix.lower() for file in _files(path)})
    data = [suffix for suffix in suffixes if suffix in BUILDERS]
    if not suffixes:
        raise FileNotFoundError(f"The folder {path!r} has no file that ends in {', '.join(FILE_SUFFIXES)}.")
    if 0 < len(data) < len(suffixes) or len({BUILDERS[suffix] for suffix in data}) > 1:
        raise ValueError(
            f"The folder {path!r} has files of several kinds ({', '.join(suffixes)}): name a file, or a folder with one kind."
        )
    return bool(data)


def _files(path: str) -> list[Path]:
    """Return the files of a folder that can be read, in order."""
    files = (file for file in Path(path).rglob("*") if file.suffix.lower() in FILE_SUFFIXES and file.name != README)
    return sorted(file for file in files if file.is_file())


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{file} is not UTF-8 text ({error.reason} at byte {error.start}): convert it first."
        ) from error


def _check_rows(file: Path) -> None:
    """Raise `ValueError` if a row of a JSON file is null: `datasets` would crash the process."""
    with file.open("rb") as lines:
        rows = (line.strip(b"\xef\xbb\xbf \t\r\n") for line in lines)
        first = next(filter(None, rows), b"")
        is_list, starts_object = first.startswith(b"["), first.startswith(b"{") and not first.endswith(b"}")
        has_null = not is_list and not starts_object and (first == b"null" or b"null" in rows)
    if is_list:
        with suppress(ValueError, RecursionError):  # `datasets` says what is wrong
            has_null = None in json.loads(file.read_bytes())
    if has_null:
        raise ValueError(f"{file} holds null in place of a row: remove it.")


def _load(name: str, dataset: TextDataset, test: bool) -> Documents:
    """Load a named dataset, for evaluation (`test`) or calibration."""
    split, file, is_folder = dataset.splits[test], dataset.files[test], os.path.isabs(dataset.path)
    is_local = is_folder or dataset.path in ("txt", *BUILDERS.values())
    source = Path(file or dataset.path).name if is_local else f"{name} ({dataset.path}, split {split})"
    if dataset.path == "txt":  # without `datasets`, which takes seconds to import
        files = _files(file) if os.path.isdir(file) else [Path(file)]
        return Documents([_read_text(file) for file in files], source, joined=len(files) == 1)
    if is_local:
        for one in _files(dataset.path) if is_folder else [Path(file)]:
            if BUILDERS.get(one.suffix.lower()) == "json":
                _check_rows(one)
    import datasets

    try:
        path = dataset.path
        if file and not is_local:  # offline, `datasets` looks for such files under another name in its cache
            path, file = next(kind for suffix, kind in BUILDERS.items() if suffix in file), _download(dataset, file)
        elif not is_local:
            check_connection()
        options = {"keep_default_na": False} if path == "csv" else {}  # "NA" is a text
        options |= {"data_files": {split: glob.escape(file)} if file else None, "split": None if is_folder else split}
        data = datasets.load_dataset(path, dataset.config, **options)
        if is_folder:
            data = _split_of(data, test)
    except Exception as error:  # no network, an unknown id or split, a gated dataset, a damaged file
        cause = error if isinstance(error, ConnectionError) else error.__cause__ or error
        reason = textwrap.shorten(str(cause), 300).rstrip(".") or type(error).__name__
        raise RuntimeError(f"Could not load the dataset {source}: {reason}. Pass {ALTERNATIVES}.") from error
    if test and dataset.test_documents:
        data = data.select(range(min(dataset.test_documents, len(data))))
    windows = dataset.test_windows if test else None
    documents = _column(data, dataset.column, source)
    return replace(documents, separator=dataset.separator, joined=dataset.joined, max_windows=windows)


def _split_of(data: Any, test: bool) -> Any:
    """Return the split of a folder's files for evaluation (`test`) or calibration. A single split serves both."""
    for name in ("test", "validation") if test else ("train",):
        if name in data:
            return data[name]
    if len(data) > 1:
        raise ValueError(f"it has the splits {', '.join(data)}: expected {'test or validation' if test else 'train'}")
    return next(iter(data.values()))


def _download(dataset: TextDataset, file: str) -> str:
    """Return the path of a file of a Hub dataset in the cache, downloaded if it is not there."""
    where = {"repo_type": "dataset", "revision": dataset.revision}
    with suppress(LocalEntryNotFoundError):
        return hf_hub_download(dataset.path, file, local_files_only=True, **where)
    check_connection()
    return hf_hub_download(dataset.path, file, **where)


def _in_memory(dataset: Any, most: int) -> tuple[Any, None, str, str]:
    """Return the arguments of [`_column`] for a dataset in memory; of a stream, at most the first `most` documents."""
    import datasets

    if not isinstance(dataset, datasets.IterableDataset):
        return dataset, None, "a datasets.Dataset", "Pass one of them: dataset[{!r}]"
    head = datasets.Dataset.from_list(list(dataset.take(most)), features=dataset.features)
    source = f"the first {len(head)} documents of a datasets.IterableDataset"
    return head, None, source, "Rename one: dataset.rename_column({!r}, 'text')"


def _column(data: Any, column: str | None, source: str, how: str = NAMED) -> Documents:
    """Return the named column of a `datasets.Dataset`, or the one that this module's docstring says.

    `how`: what the caller does to choose a column.
    """
    columns = _find_columns(data, column, source, how)
    if len(columns) > 1:
        return Documents(data.select_columns(columns), source)
    documents = Documents(data[columns[0]], source)
    _note_nulls(documents, data.select_columns(columns).with_format("arrow")[:][columns[0]].null_count)
    return documents


def _find_columns(data: Any, column: str | None, source: str, how: str) -> list[str]:
    """Return the names of the columns that hold the documents."""
    import datasets

    if not isinstance(data, datasets.Dataset):
        raise TypeError(
            f"A dataset of type {type(data).__name__} is not supported. Pass a name, {ALTERNATIVES}, one split of a "
            "datasets.Dataset, a column of it, or a datasets.IterableDataset."
        )
    names = data.column_names
    strings = [name for name in names if str(getattr(data.features[name], "dtype", "")).endswith("string")]
    accepted = [[column]] if column else [["text"], ["messages"], ["conversations"], [*PAIR]]
    for columns in [*accepted, strings] if not column and len(strings) == 1 else accepted:
        if set(columns) <= set(names):
            return columns
    missing = " or ".join(" with ".join(map(repr, columns)) for columns in accepted)
    how = how.format(*names[:1] or [""])
    raise ValueError(f"The dataset ({source}) has no column {missing}, only {', '.join(names) or 'none'}. {how}.")


def _note_nulls(documents: Documents, nulls: int) -> None:
    if nulls:
        logger.warning(f"{nulls} of {len(documents)} documents of {documents.source} are null: they count as empty.")
