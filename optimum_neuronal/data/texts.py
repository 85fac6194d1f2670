"""Texts with where they come from, and which column of a table holds them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from .conversations import MESSAGES


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


def from_dataset(data, column: str | None, source: str) -> Documents:
    import datasets

    if not isinstance(data, datasets.Dataset):
        raise TypeError(
            f"A dataset of type {type(data).__name__} is not supported. Pass a name, {ALTERNATIVES}, or one split "
            "of a datasets.Dataset."
        )
    column = text_column(data.column_names, string_columns(data.features), column, source)
    return Documents(data[column], f"{source}, column {column}")


def string_columns(features: Mapping) -> list[str]:
    """Names of the columns of strings."""
    return [name for name, kind in features.items() if str(getattr(kind, "dtype", "")).endswith("string")]


def text_column(names: Iterable[str], strings: Sequence[str], column: str | None, source: str) -> str:
    """The column that was asked for; else `text`, `messages`, or the only one of strings."""
    names = list(names)
    if column is None:
        only = strings if len(strings) == 1 else []
        column = next((name for name in ("text", MESSAGES, *only) if name in names), "text")
    if column not in names:
        raise ValueError(f"The dataset ({source}) has no column {column!r}, it has: {', '.join(names)}.")
    return column
