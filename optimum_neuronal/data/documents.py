"""Text datasets of any kind, opened as lists of documents.

A dataset is a name in `CALIBRATION_DATASETS`; a Hub dataset, `"id"`, `"id:split"`, `"id:split:column"` or
`"id:config:split:column"`; a .txt, .csv, .jsonl (one object per line) or .parquet file, `"FILE"` or `"FILE:column"`; a
list of strings; a `datasets.Dataset`. Where no column is named it is `text`, else `messages`, else the only one of strings.
Entries may be conversations instead of texts, see `conversations`.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from .conversations import Conversations, is_conversation
from .hub_datasets import CALIBRATION_DATASETS, HubDataset, parse_hub_name
from .hub_loading import check_access, from_hub
from .text_files import READERS
from .texts import Documents, from_dataset


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
        documents = _from_name(os.fspath(dataset), split, from_hub)
    elif isinstance(dataset, (list, tuple)):
        kind = "conversations" if dataset and is_conversation(dataset[0]) else "strings"
        documents = Documents(list(dataset), f"a list of {len(dataset)} {kind}", joined=len(dataset) == 1)
    else:
        documents = from_dataset(dataset, None, "a datasets.Dataset")
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
    documents = _from_name(name, split, check_access)
    if documents is not None and not _holds_conversations(documents):
        _with_text(documents)


def _holds_conversations(documents: Documents) -> bool:
    return len(documents) > 0 and is_conversation(documents.texts[0])


def _with_text(documents: Documents) -> Documents:
    in_memory = isinstance(documents.texts, list)  # so an entry that is no string can be known at once
    if not any(text.strip() for text in (list(documents) if in_memory else documents)):
        what = "only blank documents" if len(documents) else "no documents"
        raise ValueError(f"The dataset ({documents.source}) holds {what}: pass one with text.")
    return documents


def _from_name(name: str, split: str, on_hub: Callable[[HubDataset, str, str], Documents | None]) -> Documents | None:
    """Documents of a file that a name means, or what `on_hub` makes of a dataset on the Hub."""
    if name in CALIBRATION_DATASETS:
        return on_hub(CALIBRATION_DATASETS[name], name, split)
    head, _, tail = name.rpartition(":")
    has_column = Path(head).suffix.lower() in READERS
    path, column = (head, tail) if has_column else (name, None)
    path = os.path.expanduser(path)
    suffix = Path(path).suffix.lower()
    if os.path.isdir(path) or (os.path.isfile(path) and suffix not in READERS):
        kind = "folder" if os.path.isdir(path) else "file of an unknown kind"
        raise ValueError(f"The dataset {name!r} is a {kind}: pass one file that ends in {', '.join(READERS)}.")
    if os.path.isfile(path):
        return READERS[suffix](path, column)
    if suffix in READERS:
        raise FileNotFoundError(f"The dataset file {path!r} does not exist: check its path.")
    return on_hub(parse_hub_name(name), name, split)
