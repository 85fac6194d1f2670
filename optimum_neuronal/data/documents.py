"""Opens text datasets of any kind as documents.

A dataset is a name in `CALIBRATION_DATASETS`; a Hub dataset, `"id"`, `"id:split"`, `"id:split:column"` or
`"id:config:split:column"`; a .txt, .csv, .jsonl (one object per line) or .parquet file, a folder of such files, or a
folder of `save_to_disk`, `"PATH"` or `"PATH:column"`; a list of strings; a `datasets.Dataset`. If no column is named it
is `text`, else `messages`, else the only column of strings. Entries may be conversations instead of texts.
"""

import glob
import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from .hub_datasets import CALIBRATION_DATASETS, HubDataset, from_hub, parse_hub_name
from .texts import Documents, from_dataset, is_conversation


# Ending -> builder of `datasets`, and its options. With index_col=None a row with too many fields would lose its first.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    ".txt": ("text", {"sample_by": "document", "encoding": "utf-8-sig"}),
    ".csv": ("csv", {"keep_default_na": False, "index_col": False}),
    ".jsonl": ("json", {}),
    ".parquet": ("parquet", {}),
}
FILE_SUFFIXES = tuple(KINDS)
SAVED = ("state.json", "dataset_dict.json")  # files of a folder of `save_to_disk`


def load_documents(dataset: Any, split: str = "train", tokenizer: Any = None) -> Documents:
    """Open a text dataset.

    Args:
        dataset: any kind of text that this module's docstring lists.
        split (`"train"` or `"test"`): the split to load if the name does not say.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): its chat template makes text of conversations.

    Returns:
        [`Documents`]: at least one, at least one of them not blank.

    Raises:
        `RuntimeError`: a Hub dataset could not be loaded, e.g. without network.
        `FileNotFoundError`, `ValueError`, `TypeError`: no such file, name or column; no text; not text; conversations
            without a chat template.
    """
    if isinstance(dataset, (str, os.PathLike)):
        documents = _from_name(os.fspath(dataset), split)
        assert documents is not None  # it was downloaded
    elif isinstance(dataset, (list, tuple)):
        kind = "conversations" if dataset and is_conversation(dataset[0]) else "strings"
        documents = Documents(list(dataset), f"a list of {len(dataset)} {kind}", joined=len(dataset) == 1)
    else:
        documents = from_dataset(dataset, None, "a datasets.Dataset")
    if documents.holds_conversations:
        if getattr(tokenizer, "chat_template", None) is None:
            lacking = "no tokenizer was given" if tokenizer is None else "the tokenizer has none"
            raise ValueError(
                f"The dataset ({documents.source}) holds conversations, which need a chat template, and {lacking}: set "
                "tokenizer.chat_template, or pass text."
            )
        documents = replace(documents, tokenizer=tokenizer)
    documents.check()
    return documents


def check_dataset(name: str, split: str = "train") -> None:
    """Raise what [`load_documents`] would, as far as that is known without a download and a tokenizer.

    A file is read. The Hub is asked if the dataset exists and may be read; without a connection the cache is read.

    Args:
        name (`str`), split (`"train"` or `"test"`): see [`load_documents`].
    """
    documents = _from_name(name, split, download=False)
    if documents is not None and not documents.holds_conversations:
        documents.check()


def find_dataset(name: str) -> tuple[str, str | None] | HubDataset:
    """Return path and column of a dataset on this machine, or the address of one on the Hub; open nothing.

    Raises:
        `FileNotFoundError`, `ValueError`: no such file or folder, or a name that is no dataset's.
    """
    """Return the documents of a local path, or the result of `on_hub` for a dataset of the Hub."""
    if name in CALIBRATION_DATASETS:
        return CALIBRATION_DATASETS[name]
    path, column = os.path.expanduser(name), None
    head, _, tail = path.rpartition(":")
    if not os.path.exists(path) and (Path(head).suffix.lower() in KINDS or os.path.isdir(head)):
        path, column = head, tail
    if os.path.exists(path):
        return path, column
    if Path(path).suffix.lower() in KINDS or path.startswith((".", os.sep)):
        kind = "file" if Path(path).suffix.lower() in KINDS else "folder"
        raise FileNotFoundError(f"The dataset {kind} {path!r} does not exist: check its path.")
    return parse_hub_name(name)


def _from_name(name: str, split: str, download: bool = True) -> Documents | None:
    """Open a named dataset. Without `download` one on the Hub is None, if it could be loaded."""
    found = find_dataset(name)
    return from_hub(found, name, split, download) if isinstance(found, HubDataset) else _from_path(*found, split)


def _from_path(path: str, column: str | None, split: str) -> Documents:
    """Read a file, a folder of files of one kind (each .txt file is a document), or a folder of `save_to_disk`."""
    is_saved = any(os.path.isfile(os.path.join(path, name)) for name in SAVED)
    kind, source = "dataset" if is_saved else _kind_of(path), Path(path).name
    if kind == ".txt" and column is not None:
        raise ValueError(f"The text in {path!r} has no column {column!r}: leave {':' + column!r} away.")
    if kind == ".txt" and os.path.isfile(path):  # without `datasets`, which takes seconds to import
        try:
            return Documents([Path(path).read_text(encoding="utf-8-sig")], source, joined=True)
        except UnicodeDecodeError as error:
            raise ValueError(f"The file {path!r} is not UTF-8 text ({error.reason}): convert it.") from error
    try:
        data = _load(path, kind, split)
    except Exception as error:  # of datasets, pyarrow and pandas, and OSError
        reason = str(error.__cause__ or error).strip().rstrip(".") or "it is empty"
        raise ValueError(f"{path!r} could not be read as {kind}: {reason}.") from error
    documents = from_dataset(data, column, source, f"{path}:COLUMN")
    return documents if is_saved else replace(documents, entries=list(documents.entries))  # the whole file is checked


def _kind_of(path: str) -> str:
    """Return the ending of a file, or of the files in a folder that can be read."""
    is_file = os.path.isfile(path)
    endings = {file.suffix.lower() for file in ([Path(path)] if is_file else Path(path).rglob("*"))}
    kinds = sorted(endings & KINDS.keys())
    if len(kinds) != 1:
        found = "a file of an unknown kind" if is_file else f"a folder with {' and '.join(kinds) or 'no such'} files"
        raise ValueError(
            f"The dataset {path!r} is {found}: pass a file that ends in {', '.join(KINDS)}, or a folder of one kind of them."
        )
    return kinds[0]


def _load(path: str, kind: str, split: str) -> Any:
    """Return a `datasets.Dataset`; nothing stays in the user's cache."""
    import datasets

    if kind not in KINDS:
        data = datasets.load_from_disk(path)
    else:
        builder, options = KINDS[kind]
        files = glob.escape(path) if os.path.isfile(path) else None
        with _quiet(), tempfile.TemporaryDirectory() as cache:
            name = os.path.abspath(path) if files is None else builder
            data = datasets.load_dataset(name, data_files=files, cache_dir=cache, keep_in_memory=True, **options)
    if isinstance(data, datasets.Dataset):
        return data
    if split not in data and len(data) > 1:
        raise ValueError(f"it has no split {split!r}, but {', '.join(data)}")
    return data[split] if split in data else next(iter(data.values()))


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the log and the bars of `datasets`, and make an error of pandas' warning that it drops fields of a row."""
    import datasets
    from datasets.utils import logging

    before, had_bars = logging.get_verbosity(), not datasets.are_progress_bars_disabled()
    logging.set_verbosity(logging.CRITICAL)
    datasets.disable_progress_bars()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Length of header or names does not match")
            yield
    finally:
        logging.set_verbosity(before)
        if had_bars:
            datasets.enable_progress_bars()
