"""The texts of a dataset, and the column that holds them. A chat template makes text of conversations."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


ALTERNATIVES = (
    "a local .txt, .csv, .jsonl or .parquet file, a folder of them, a list of strings, or token ids of shape (N, L)"
)
USUAL = ("content", "body", "document", "sentence")  # names of columns of text that are not sure enough to be taken
MESSAGES = "messages"  # the usual name of a column of conversations


def is_conversation(entry: Any) -> bool:
    """Return True if an entry of a dataset is a list of messages, each with a role and a content."""
    return (
        isinstance(entry, (list, tuple))
        and len(entry) > 0
        and all(isinstance(message, Mapping) and {"role", "content"} <= message.keys() for message in entry)
    )


@dataclass(frozen=True)
class Documents(Sequence):
    """Texts that are read when they are asked for.

    An entry that is not text, or not a conversation where the first one is, raises `TypeError` with its index; a text that
    cannot be encoded, or a conversation that the chat template refuses, raises `ValueError`.

    Args:
        entries (`Sequence`): texts or conversations: a list, or the column of a `datasets.Dataset`.
        source (`str`): where they come from, for reports and errors; of a file, its name without its folder.
        separator (`str`): put between documents when they are joined.
        joined (`bool`): use the documents joined only, never one by one.
        max_windows (`int`): evaluate on at most this number of windows.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): its chat template makes text of conversations. None: texts.
    """

    entries: Sequence
    source: str
    separator: str = "\n\n"
    joined: bool = False
    max_windows: int | None = None
    tokenizer: Any = None

    @property
    def templated(self) -> bool:
        """True if a chat template makes the texts: they then hold all special tokens."""
        return self.tokenizer is not None

    @property
    def holds_conversations(self) -> bool:
        """True if the first entry is a conversation."""
        return len(self) > 0 and is_conversation(self.entries[0])

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: int) -> str:
        return self._text(index, self.entries[index])

    def __iter__(self) -> Iterator[str]:
        return (self._text(index, entry) for index, entry in enumerate(self.entries))

    def join(self) -> str:
        """Return all documents as one text, with the separator between them."""
        return self.separator.join(self)

    def check(self) -> None:
        """Raise the error of the first bad entry if they are in memory, and `ValueError` if no document has text."""
        if isinstance(self.entries, list):
            for index, entry in enumerate(self.entries):
                self._check(index, entry)
        if not any(text.strip() for text in self):
            found = "only blank documents" if len(self) else "no documents"
            raise ValueError(f"The dataset ({self.source}) holds {found}: pass one with text.")

    def _text(self, index: int, entry: Any) -> str:
        self._check(index, entry)
        if self.tokenizer is None:
            return entry
        try:
            return self.tokenizer.apply_chat_template(entry, tokenize=False)
        except ImportError:
            raise
        except Exception as error:  # a template may raise anything
            raise ValueError(
                f"Document {index} of {self.source} does not go through the tokenizer's chat template: {error}"
            ) from error

    def _check(self, index: int, entry: Any) -> None:
        if self.tokenizer is not None and not is_conversation(entry):
            raise TypeError(
                f"Document {index} of {self.source} is no conversation, but the first one is: expected a list of messages, "
                "each with 'role' and 'content'."
            )
        if self.tokenizer is None and not isinstance(entry, str):
            kind = type(entry).__name__
            raise TypeError(f"Document {index} of {self.source} is of type {kind}: every document has to be a string.")
        try:
            (entry if self.tokenizer is None else "").encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"Document {index} of {self.source} has a lone surrogate, {entry[error.start]!r}, at character {error.start}, "
                "which tokenizers do not read. Take it out."
            ) from error


def from_dataset(
    data: Any, column: str | None, source: str, naming: str = "dataset.select_columns('COLUMN')"
) -> Documents:
    """Return one column of a `datasets.Dataset` as documents.

    Args:
        data (`datasets.Dataset`): one split.
        column (`str`, *optional*): None: `text`, else `messages`, else the only column of strings.
        source (`str`): see [`Documents`].
        naming (`str`): how the caller names a column, for messages; COLUMN stands for its name.

    Raises:
        `TypeError`: not a `datasets.Dataset`.
        `ValueError`: there is no such column.
    """
    import datasets

    if not isinstance(data, datasets.Dataset):
        raise TypeError(
            f"A dataset of type {type(data).__name__} is not supported. Pass a name, {ALTERNATIVES}, or one split "
            "of a datasets.Dataset."
        )
    names, features = data.column_names, data.features
    strings = [name for name in names if str(getattr(features[name], "dtype", "")).endswith("string")]
    column = column or _text_column(names, strings)
    if column not in names:
        usual = next((name for name in USUAL if name in strings), next(iter(strings), None))
        hint = f" Name the one of the text: {naming.replace('COLUMN', usual)}" if usual else ""
        raise ValueError(f"The dataset ({source}) has no column {column!r}, it has: {', '.join(names)}.{hint}")
    return Documents(data[column], f"{source}, column {column}")


def _text_column(names: Iterable[str], strings: Sequence[str]) -> str:
    only = strings if len(strings) == 1 else []
    return next((name for name in ("text", MESSAGES, *only) if name in names), "text")
