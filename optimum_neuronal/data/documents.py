"""`Documents`: what a dataset is.

A dataset is one of:

- a name in `KNOWN_DATASETS`;
- a Hub dataset: `"id"`, `"id:split"`, `"id:split:column"` or `"id:config:split:column"`;
- a file of text or a .csv, .json, .jsonl or .parquet file: `"PATH"` or `"PATH:column"`;
- a list of strings or conversations, one split of a `datasets.Dataset`, a column of it, or a `datasets.IterableDataset`.

If no column is named it is `text`, else `messages`, `conversations`, or `prompt` with `completion`, else the only column.
Conversations are lists of messages, with `role` and `content` or ShareGPT's `from` and `value`. The tokenizer's chat
template renders them, with the `tools` in a column beside them. Nulls count as empty texts.
"""

import copy
import glob
import json
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from ..common.connection import is_connected
from ..common.notes import get_logger
from .conversations import CHATS, PAIR, TOOLS, are_conversations, find_template, render
from .known_datasets import BUILDERS, KNOWN_DATASETS, parse_name, split_shares
from .token_windows import text_tokenizer


logger = get_logger(__name__)

STREAM_DOCUMENTS = 10_000  # read from a stream, to draw calibration sequences or to test


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
    lost: dict[int, int] = field(default_factory=dict, repr=False)  # document -> turns that the template leaves out

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
            text, self.lost[index] = render(entry, self.template, f"document {index} of {self.source}")
            return text
        if not isinstance(entry, str):
            raise TypeError(
                f"Document {index} of {self.source} is a {type(entry).__name__}: expected a string, or messages."
            )
        return entry

    def note_lost_turns(self) -> None:
        """Say how many turns the chat template left out of the documents that were read."""
        if count := sum(self.lost.values()):
            logger.warning(
                f"The chat template leaves out {count} turns or lists of tools of {self.source}: those without text, or "
                "of a kind that it does not know, such as calls of tools."
            )

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

    The split, `"train"` or `"test"`, is for datasets that do not name one. With `streaming`, to train on them, a
    `datasets.IterableDataset` and C4 are read while they are used; without a connection, C4's first file is read from the
    cache. Otherwise the first `STREAM_DOCUMENTS` documents of a stream are read.
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
    documents = replace(documents, tokenizer=copy.deepcopy(tokenizer))  # a call changes truncation and padding in it
    if are_conversations(documents.entries):
        documents = replace(documents, separator="", template=find_template(tokenizer, documents.source))
    if not any(map(str.strip, documents)):
        raise ValueError(f"The dataset ({documents.source}) holds no text.")
    return documents


def check_texts(tokenizer: Any, datasets: Sequence[Any], tests: Iterable[Any], streaming: bool = False) -> None:
    """Open all that are named, and raise an error if one holds no text that the tokenizer can take.

    `datasets` are used together, and may have shares. `tests` are used one by one.
    """
    used = [*((one, "train") for one, _ in split_shares(datasets)), *((one, "test") for one in tests)]
    named = [(os.fspath(one), split) for one, split in used if isinstance(one, (str, os.PathLike))]
    for name, _ in named:
        parse_name(name)  # before anything is downloaded
    for name, split in named:
        load_documents(name, split, tokenizer, streaming and split == "train")


def read_prompts(path: str | os.PathLike[str]) -> list[Any]:
    """Return the prompts of a file that are not empty: its lines if it is text, else its rows."""
    documents = _load_named(os.fspath(path), "train", streaming=False)
    prompts = [line for text in documents for line in text.splitlines()] if documents.joined else documents.entries
    prompts = [prompt for prompt in prompts if prompt is not None and str(prompt).strip()]
    if not prompts:
        raise ValueError(f"{path} holds no prompts: expected lines of text, or rows of conversations.")
    return prompts


def _load_named(name: str, split: str, streaming: bool) -> Documents:
    path, config, its_split, column = parse_name(name)
    if path in KNOWN_DATASETS:
        return _load_known(path, split, streaming)
    if os.path.isfile(path):
        source = Path(path).name
        if Path(path).suffix.lower() not in BUILDERS:  # without `datasets`, which takes seconds to import
            text = _read(source, lambda: Path(path).read_text(encoding="utf-8-sig"))
            return Documents([text], source, joined=True)
        return _column_of(_read_file(path, source), column, source)
    split = its_split or split
    source = f"{name} ({path}, split {split})"
    return _column_of(_load_dataset(source, path, name=config, split=split), column, source)


def _load_known(name: str, split: str, streaming: bool) -> Documents:
    known = KNOWN_DATASETS[name]
    source, streaming, windows = f"{name} ({known.path}, split {split})", streaming and known.streamed, None
    if streaming and is_connected():
        data = _load_dataset(source, known.path, name=known.config, split=split, streaming=True)
    else:
        data = _read_file(known.download(split), source, streaming=streaming)
    if split == "test":
        data, windows = data.select(range(min(len(data), known.test_documents or len(data)))), known.test_windows
    return Documents(data[known.column], source, None, known.separator, known.joined, windows)


def _read_file(path: str, source: str, **options: Any) -> Any:
    builder = BUILDERS[Path(path.removesuffix(".gz")).suffix.lower()]
    options |= {"keep_default_na": False} if builder == "csv" else {}  # "NA" is a text
    return _load_dataset(source, builder, path, split="train", **options)


def _load_dataset(source: str, path: str, file: str | None = None, **options: Any) -> Any:
    import datasets

    options |= {} if file is None else {"data_files": glob.escape(file)}
    return _read(source, lambda: datasets.load_dataset(path, **options), file)


def _read(source: str, read: Callable[[], Any], file: str | None = None) -> Any:
    """Return what a function reads. An error names the dataset, and the first damaged line of a .jsonl file."""
    try:
        return read()
    except Exception as error:  # of many kinds: an unknown id or split, a gated dataset, a damaged file
        reason = str(error.__cause__ or error) or "it is empty"
        if file and file.endswith(".jsonl"):
            for number, line in enumerate(Path(file).read_bytes().splitlines(), start=1):
                try:
                    json.loads(line.strip() or b"null")
                except ValueError as cause:
                    reason = f"line {number} is not valid JSON: {cause}"
                    break
        raise RuntimeError(f"Could not load the dataset {source}: {reason}") from error


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
    accepted = [[column]] if column else [["text"], *([name] for name in CHATS), [*PAIR]]
    accepted += [[*features]] if len(features) == 1 else []
    columns = next((names for names in accepted if features.keys() >= {*names}), None)
    if columns is None:
        wanted = column or "text, messages, conversations, or prompt with completion"
        raise ValueError(
            f"The dataset ({source}) has no column {wanted}, only {', '.join(features) or 'none'}. Name one after a colon "
            "(NAME:COLUMN), or in Python rename one to text."
        )
    columns += [TOOLS] if TOOLS in features and columns[0] in (*CHATS, *PAIR) else []
    return Documents(data.select_columns(columns) if len(columns) > 1 else data[columns[0]], source)
