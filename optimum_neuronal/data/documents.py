"""`Documents`: what a dataset is.

A dataset is one of:

- a name in `KNOWN_DATASETS`;
- a Hub dataset: `"id"`, `"id:split"`, `"id:split:column"` or `"id:config:split:column"`;
- a file of text or a .csv, .json, .jsonl or .parquet file: `"PATH"` or `"PATH:column"`;
- a list of strings or conversations, one split of a `datasets.Dataset`, a column of it, or a `datasets.IterableDataset`.

If no column is named it is `text`, else `messages`, `conversations`, or `prompt` with `completion`, else the only column of
strings. Conversations are lists of messages, with `role` and `content` or ShareGPT's `from` and `value`. The tokenizer's
chat template renders them. Nulls count as empty texts.
"""

import glob
import os
import random
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from huggingface_hub import is_offline_mode
from transformers import ProcessorMixin

from .known_datasets import BUILDERS, KNOWN_DATASETS, parse_name
from .token_windows import text_tokenizer


STREAM_DOCUMENTS = 10_000  # read from a stream, to draw calibration sequences or to test
PAIR = ("prompt", "completion")  # columns that hold a conversation together
ROLES = {"human": "user", "gpt": "assistant"}  # ShareGPT's names; others are kept
MESSAGES = "a list of messages, such as {'role': 'user', 'content': 'Hello'}"


@dataclass(frozen=True)
class Documents:
    """Strings or conversations, read on demand, and how they become text and tokens."""

    entries: Iterable[Any]  # a sequence, or a stream to train on
    source: str  # for reports and errors: a file's name has no folder
    tokenizer: Any = field(default=None, repr=False)  # or processor
    separator: str = "\n\n"
    joined: bool = False  # True: they make sense only together, in their order
    max_windows: int | None = None  # of an evaluation
    # The tokenizer or processor whose chat template renders conversations; None: the entries are strings.
    template: Any = field(default=None, repr=False)

    @property
    def is_stream(self) -> bool:
        return not hasattr(self.entries, "__len__")

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: int) -> str:
        return self._text_of(index, self.entries[index])

    def __iter__(self) -> Iterator[str]:
        return (self._text_of(index, entry) for index, entry in enumerate(self.entries))

    def _text_of(self, index: int, entry: Any) -> str:
        if entry is None:
            return ""
        if self.template is not None:
            return render(entry, self.template, f"document {index} of {self.source}")
        if not isinstance(entry, str):
            raise TypeError(
                f"Document {index} of {self.source} is a {type(entry).__name__}: expected a string, or messages."
            )
        return entry

    def shuffled(self, seed: int) -> Iterator[str]:
        """Yield the texts in an order that the seed decides. Joined ones are one text, and streams keep their order."""
        if self.joined:
            yield self.separator.join(self)
        elif self.is_stream:
            yield from self
        else:
            yield from (self[index] for index in random.Random(seed).sample(range(len(self)), len(self)))

    def tokenize(self, text: str, bos: int | None) -> list[int]:
        """Return the token ids of a text of any length, without a BOS token at its start if `bos` names it."""
        # A chat template adds special tokens itself.
        options = {"add_special_tokens": self.template is None, "truncation": False, "verbose": False}
        ids = text_tokenizer(self.tokenizer)(text, **options)["input_ids"]
        return ids[1:] if bos is not None and ids[:1] == [bos] else ids

    def tokenize_joined(self, bos: int | None) -> list[int]:
        """Return the token ids of all documents as one text. Conversations are tokenized one by one."""
        if self.template is None:
            return self.tokenize(self.separator.join(self), bos)
        return [token for text in self for token in self.tokenize(text, bos)]


def load_documents(dataset: Any, split: str = "train", tokenizer: Any = None, streaming: bool = False) -> Documents:
    """Open a text dataset of any kind that this module's docstring lists; raise if it holds no text.

    Args:
        dataset: what to open.
        split (`str`): `"train"` or `"test"`, for datasets that do not name one.
        tokenizer (*optional*): a tokenizer or processor, with a chat template for conversations.
        streaming (`bool`):
            True for streams to train on: a `datasets.IterableDataset`, and C4, which is read from the Hub while it is used;
            in offline mode its first file is read from the cache. False: a stream's first `STREAM_DOCUMENTS` documents.
    """
    if isinstance(dataset, (str, os.PathLike)):
        documents = _load_named(os.fspath(dataset), split, streaming)
    elif isinstance(dataset, Sequence):  # also a column of a datasets.Dataset
        kind = "conversations" if are_conversations(dataset) else "strings"
        documents = Documents(list(dataset), f"a list of {len(dataset)} {kind}", joined=len(dataset) == 1)
    else:
        documents = _column_of(dataset)
    if documents.is_stream and not streaming:
        first = list(islice(documents.entries, STREAM_DOCUMENTS))
        documents = Documents(first, f"the first {len(first)} documents of {documents.source}")
    documents = replace(documents, tokenizer=tokenizer)
    if are_conversations(documents.entries):
        documents = replace(documents, separator="", template=find_template(tokenizer, documents.source))
    if not any(map(str.strip, documents)):
        raise ValueError(f"The dataset ({documents.source}) holds no text.")
    return documents


def _load_named(name: str, split: str, streaming: bool) -> Documents:
    path, config, its_split, column = parse_name(name)
    if path in KNOWN_DATASETS:
        return _load_known(path, split, streaming)
    if os.path.isfile(path):
        source = Path(path).name
        if Path(path).suffix.lower() not in BUILDERS:  # without `datasets`, which takes seconds to import
            return Documents([Path(path).read_text(encoding="utf-8-sig")], source, joined=True)
        return _column_of(_read_file(path, source), column, source)
    split = its_split or split
    source = f"{name} ({path}, split {split})"
    return _column_of(_load_dataset(source, path, name=config, split=split), column, source)


def _load_known(name: str, split: str, streaming: bool) -> Documents:
    known = KNOWN_DATASETS[name]
    source, streaming, windows = f"{name} ({known.path}, split {split})", streaming and known.streamed, None
    if streaming and not is_offline_mode():
        data = _load_dataset(source, known.path, name=known.config, split=split, streaming=True)
    else:
        data = _read_file(known.download(split), source, streaming=streaming)
    if split == "test":
        data, windows = data.select(range(min(len(data), known.test_documents or len(data)))), known.test_windows
    return Documents(data[known.column], source, None, known.separator, known.joined, windows)


def _read_file(path: str, source: str, **options: Any) -> Any:
    builder = BUILDERS[Path(path.removesuffix(".gz")).suffix.lower()]
    options |= {"keep_default_na": False} if builder == "csv" else {}  # "NA" is a text
    return _load_dataset(source, builder, data_files=glob.escape(path), split="train", **options)


def _load_dataset(source: str, path: str, **options: Any) -> Any:
    import datasets

    try:
        return datasets.load_dataset(path, **options)
    except Exception as error:  # of many kinds: an unknown id or split, a gated dataset, a damaged file
        raise RuntimeError(f"Could not load the dataset {source}: {error.__cause__ or error}") from error


def _column_of(data: Any, column: str | None = None, source: str | None = None) -> Documents:
    """Return the named column of a dataset, or the one that this module's docstring says."""
    import datasets

    if not isinstance(data, (datasets.Dataset, datasets.IterableDataset)):
        raise TypeError(
            f"A dataset of type {type(data).__name__} is not supported. Pass a name, a file, a list of strings or "
            "conversations, token ids of shape (N, L), one split of a datasets.Dataset, or a datasets.IterableDataset."
        )
    source = source or f"a datasets.{type(data).__name__}"
    features = data.features or datasets.Dataset.from_list(list(data.take(100))).features  # a stream's may be unknown
    strings = [name for name, kind in features.items() if str(getattr(kind, "dtype", "")).endswith("string")]
    accepted = [[column]] if column else [["text"], ["messages"], ["conversations"], [*PAIR]]
    accepted += [strings] if len(strings) == 1 and not column else []
    columns = next((names for names in accepted if features.keys() >= {*names}), None)
    if columns is None:
        wanted = column or "text, messages, conversations, or prompt with completion"
        raise ValueError(
            f"The dataset ({source}) has no column {wanted}, only {', '.join(features) or 'none'}. Name one after a colon "
            "(NAME:COLUMN), or in Python rename one to text."
        )
    return Documents(data.select_columns(columns) if len(columns) > 1 else data[columns[0]], source)


def are_conversations(entries: Iterable[Any]) -> bool:
    """Return True if the first entry that is not None is a list of messages, or a row with several columns."""
    first = next((entry for entry in entries if entry is not None), None)
    return isinstance(first, Mapping) or isinstance(first, (list, tuple)) and isinstance((*first, {})[0], Mapping)


def find_template(tokenizer: Any, source: str) -> Any:
    """Return the processor or tokenizer that has a chat template, or raise `ValueError`."""
    for one in (tokenizer, getattr(tokenizer, "tokenizer", None)):
        if getattr(one, "chat_template", None):
            return one
    raise ValueError(
        f"The dataset ({source}) holds conversations, but there is no tokenizer with a chat template: pass one, set "
        "tokenizer.chat_template, or pass text."
    )


def render(entry: Any, template: Any, document: str) -> str:
    """Return a conversation as text, or raise `ValueError` that names the document."""
    messages = _messages_of(entry, document)
    if isinstance(template, ProcessorMixin):  # their templates read parts of text and images
        for message in messages:
            message["content"] = [{"type": "text", "text": message["content"]}]
    try:
        return template.apply_chat_template(messages, tokenize=False) if messages else ""
    except Exception as error:  # a template may raise anything
        raise ValueError(
            f"The chat template does not accept {document}. Change or remove this conversation, or set another "
            f"tokenizer.chat_template. ({error})"
        ) from error


def _messages_of(entry: Any, document: str) -> list[dict[str, Any]]:
    if isinstance(entry, Mapping) and entry.keys() >= {*PAIR}:
        turns = zip(("user", "assistant"), (entry[name] for name in PAIR))
        parts = [
            turn if isinstance(turn, (list, tuple)) else [{"role": role, "content": turn}] for role, turn in turns
        ]
        entry = [message for part in parts for message in part]
    if not isinstance(entry, (list, tuple)):
        raise ValueError(f"Expected {MESSAGES}, but {document} is {textwrap.shorten(repr(entry), 100)}.")
    return [_message_of(message, f"Message {number} of {document}") for number, message in enumerate(entry)]


def _message_of(message: Any, name: str) -> dict[str, Any]:
    """Return a message with a role and text, without keys whose value is None."""
    found = dict(message) if isinstance(message, Mapping) else {}
    if found.get("from") is not None:  # ShareGPT
        found = {"role": ROLES.get(str(found["from"]), found["from"]), "content": found.get("value")}
    if found.get("tool_calls"):
        found["content"] = found.get("content") or ""
    content = found.get("content")
    if isinstance(content, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
        found["content"] = content = "".join(part.get("text") or "" for part in content)
    if not isinstance(found.get("role"), str) or not isinstance(content, str):
        raise ValueError(f"{name} is {textwrap.shorten(repr(message), 100)}: expected a role and content, both text.")
    return {key: value for key, value in found.items() if value is not None}
