"""Calibration sequences: drawn from text with a seed, or taken from token ids."""

import hashlib
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from .documents import Documents, load_documents


# Families (`model_type`) whose position ids start after the padding id.
POSITIONS_AFTER_PADDING = ("camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod")  # fmt: skip
EXTRA_WINDOWS = 4  # further windows that are drawn, to measure the model on
SPAN = 16  # windows overlap if one holds the other's first or last 16 tokens (a quarter of them, if that is less)


@dataclass(frozen=True)
class CalibrationSet:
    """Sequences of token ids and their origin."""

    ids: torch.Tensor  # int64, shape (num_samples, seq_length), on the CPU
    source: str  # the dataset
    drawn_from: str  # "documents", "stream" (the joined text) or "token ids" (from the caller)
    seed: int | None = None  # of the draw; None, here and below, if nothing was drawn
    sampling: str | None = None  # see [`draw_windows`]
    add_bos: bool = False  # True if a BOS token was put at the start of every sequence
    tokenizer: PreTrainedTokenizerBase | None = field(default=None, repr=False, compare=False)  # that made the ids
    held_out: torch.Tensor | None = field(default=None, repr=False, compare=False)  # other windows, or None

    def to_dict(self) -> dict:
        """Return the origin for a report, in JSON types, with a `sha256` of the ids."""
        num_samples, seq_length = self.ids.shape
        return {
            "source": self.source,
            "drawn_from": self.drawn_from,
            "seed": self.seed,
            "sampling": self.sampling,
            "add_bos": self.add_bos,
            "num_samples": num_samples,
            "seq_length": seq_length,
            "sha256": hashlib.sha256(self.ids.numpy().astype("<i8").tobytes()).hexdigest(),
        }


def take_sequences(ids: torch.Tensor, num_samples: int, vocab_size: int) -> CalibrationSet:
    """Return the first `num_samples` of the caller's token ids, int64 of shape (N, L)."""
    if len(ids) < num_samples:
        raise ValueError(f"num_samples={num_samples}, but there are {len(ids)} sequences of token ids.")
    calibration = CalibrationSet(ids[:num_samples], f"token ids of shape {tuple(ids.shape)}", "token ids")
    check_vocabulary(calibration.ids, vocab_size)
    return calibration


def draw_windows(
    dataset,
    tokenizer,
    *,
    num_samples: int,
    seq_length: int,
    seed: int,
    vocab_size: int,
    sampling: str = "distinct",
    bos: int | None = None,
) -> CalibrationSet:
    """Draw calibration sequences from text as Wanda and SparseGPT do: random windows of random documents.

    Datasets of lines (wikitext2, ptb, .txt) are joined to one text, from which all windows come. Otherwise `sampling`
    decides about the documents:

    - `"distinct"`: Documents are visited in random order. Each one that is long enough gives one window. If these are too
      few, the long documents give further windows, provided that they hold `num_samples * seq_length` tokens together.
      If they do not, windows come from the joined text.
    - `"authors"`: The loop of NeuronAL's authors, which draws documents with replacement until one is longer than a
      window. With the same text, tokenizer and seed, the ids are those of their code.

    With `bos`, see [`resolve_bos`], every sequence is this token and a window that is one token shorter. Equal arguments
    give equal ids, whose first sequences do not depend on `num_samples`. Further windows that overlap with none of these
    are `held_out`.
    """
    documents, count = load_documents(dataset, tokenizer=tokenizer), num_samples + EXTRA_WINDOWS
    texts, length = Texts(documents, tokenizer, bos), seq_length - (bos is not None)
    if sampling == "authors":
        route = "stream" if documents.joined else "documents"
        windows = draw_as_authors(texts, count, length, seed)
    else:
        route, windows = _draw_distinct(texts, num_samples, length, seed)
    ids, others = with_bos(torch.tensor(windows), bos).split([num_samples, EXTRA_WINDOWS])
    check_vocabulary(torch.cat([ids, others]), vocab_size)
    held_out = _apart(others, ids)
    return CalibrationSet(ids, documents.source, route, seed, sampling, bos is not None, tokenizer, held_out)


@dataclass(frozen=True)
class Texts:
    """Documents as token ids, without the BOS token that the tokenizer may begin them with if `bos` names it."""

    documents: Documents
    tokenizer: Any
    bos: int | None

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> list[int]:
        return tokenize(self.documents[index], self.tokenizer, self.bos, self.documents.rendered)

    def joined(self, separator: str | None = None) -> list[int]:
        """Return the token ids of all documents as one text. Conversations are tokenized one by one."""
        if self.documents.rendered:
            return [token for index in range(len(self)) for token in self[index]]
        text = self.documents.join() if separator is None else separator.join(self.documents)
        return tokenize(text, self.tokenizer, self.bos)


def resolve_bos(model_config: Any, tokenizer: Any, add_bos: bool | None = None) -> int | None:
    """Return the BOS token to put at the start of every window, or None.

    `add_bos=None` means yes for Gemma models, as in lm-eval: without the token that began all sequences of their training,
    they predict much worse. `tokenizer=None` takes the token that the config names.
    """
    text = model_config.get_text_config()
    if not (any("gemma" in config.model_type for config in (model_config, text)) if add_bos is None else add_bos):
        return None
    bos = getattr(text if tokenizer is None else text_tokenizer(tokenizer), "bos_token_id", None)
    bos = bos[0] if isinstance(bos, list) else bos
    if bos is None and add_bos:
        raise ValueError("add_bos is True, but the tokenizer has no BOS token: leave it out, or set bos_token.")
    return bos


def with_bos(windows: torch.Tensor, bos: int | None) -> torch.Tensor:
    """Return windows, (N, L), with the BOS token before each, (N, 1 + L); without a token, return them unchanged."""
    return windows if bos is None else torch.nn.functional.pad(windows, (1, 0), value=bos)


def draw_as_authors(texts: Texts, count: int, seq_length: int, seed: int) -> list[list[int]]:
    """Return `count` windows that the code of NeuronAL's authors (lib/data.py) draws. Lines are joined by a space."""
    documents = texts.documents
    rng = random.Random(seed)
    long: dict[int, list[int] | None] = {}  # token ids of documents that were drawn; None if they are too short

    def draw() -> list[int]:
        if documents.joined:
            return stream
        while True:
            index = rng.randint(0, len(documents) - 1)
            if index not in long:
                ids = texts[index]
                long[index] = ids if len(ids) > seq_length else None
            if (drawn := long[index]) is not None:
                return drawn
            if len(long) == len(documents) and not any(long.values()):
                raise ValueError(
                    f"No document of the dataset ({documents.source}) has more than {seq_length} tokens, as sampling='authors' "
                    "needs: lower seq_length, or set sampling='distinct', which joins documents."
                )

    stream = texts.joined(" ") if documents.joined else []
    if documents.joined and len(stream) <= seq_length:
        raise ValueError(
            f"The dataset ({documents.source}) holds {len(stream)} tokens, but sampling='authors' needs more than {seq_length}: "
            "give more text, or lower seq_length."
        )
    windows = []
    for _ in range(count):
        ids = draw()
        start = rng.randint(0, len(ids) - seq_length - 1)  # the last window is never drawn
        windows.append(ids[start : start + seq_length])
    return windows


def _draw_distinct(texts: Texts, num_samples: int, seq_length: int, seed: int) -> tuple[str, list[list[int]]]:
    """Return what windows are drawn from, and `num_samples + EXTRA_WINDOWS` of them."""
    if not texts.documents.joined:
        windows = _draw_from_documents(texts, num_samples, seq_length, random.Random(seed))
        if windows is not None:
            return "documents", windows
    stream = texts.joined()
    if len(stream) < num_samples * seq_length:
        raise ValueError(
            f"The dataset ({texts.documents.source}) holds {len(stream)} tokens, but {num_samples} sequences of {seq_length} "
            f"need {num_samples * seq_length}: give more text, or lower num_samples or seq_length."
        )
    rng = random.Random(seed)
    return "stream", [_random_window(stream, seq_length, rng) for _ in range(num_samples + EXTRA_WINDOWS)]


def _apart(windows: torch.Tensor, used: torch.Tensor) -> torch.Tensor | None:
    """Return the windows, (N, L), that do not overlap with a used one, (M, L); None if all do."""
    span = min(SPAN, max(1, used.shape[1] // 4))
    spans = used.unfold(1, span, 1)

    def overlaps(window: torch.Tensor) -> bool:
        return any(bool((spans == end).all(dim=-1).any()) for end in (window[:span], window[-span:]))

    apart = [window for window in windows if not overlaps(window)]
    return torch.stack(apart) if apart else None


def _draw_from_documents(
    texts: Texts, num_samples: int, seq_length: int, rng: random.Random
) -> list[list[int]] | None:
    """Return `num_samples + EXTRA_WINDOWS` random windows of documents that are long enough, None if these hold too little."""
    windows, long = [], []
    for index in rng.sample(range(len(texts)), len(texts)):
        ids = texts[index]
        if len(ids) >= seq_length:
            long.append(ids)
            windows.append(_random_window(ids, seq_length, rng))
            if len(windows) == num_samples + EXTRA_WINDOWS:
                return windows
    lengths = [len(ids) for ids in long]
    if sum(lengths) < num_samples * seq_length:
        return None
    while len(windows) < num_samples + EXTRA_WINDOWS:
        windows.append(_random_window(rng.choices(long, lengths)[0], seq_length, rng))
    return windows


def _random_window(ids: list[int], length: int, rng: random.Random) -> list[int]:
    start = rng.randint(0, len(ids) - length)
    return ids[start : start + length]


def text_tokenizer(tokenizer: Any) -> Any:
    """Return the tokenizer of a processor, or the given tokenizer."""
    return tokenizer.tokenizer if isinstance(tokenizer, ProcessorMixin) else tokenizer


def tokenize(text: str, tokenizer, bos: int | None = None, rendered: bool = False) -> list[int]:
    """Return the token ids of a text of any length, without a BOS token at its start if `bos` names it.

    `rendered`: by a chat template, which adds special tokens itself.
    """
    options = {"add_special_tokens": not rendered, "truncation": False, "verbose": False}
    ids = text_tokenizer(tokenizer)(text, **options)["input_ids"]
    return ids[1:] if bos is not None and ids[:1] == [bos] else ids


def padding_ids(model_config, tokenizer=None) -> set[int]:
    """Return the ids that rows may be padded with: padding and end-of-text tokens."""
    sources = (model_config.get_text_config(), text_tokenizer(tokenizer))
    found = [getattr(source, name, None) for source in sources for name in ("pad_token_id", "eos_token_id")]
    return {i for ids in found for i in (ids if isinstance(ids, list) else [ids]) if i is not None}


def as_token_ids(dataset, seq_length: int | None = None, padding: Collection[int] = ()) -> torch.Tensor | None:
    """Return a tensor, array or sequence of rows as token ids: int64, shape (N, L), on the CPU; None for other datasets.

    Raise `ValueError` if a row begins or ends with two tokens of `padding`, see [`padding_ids`].
    """
    is_list = isinstance(dataset, Sequence) and not isinstance(dataset, str)  # or a column of a datasets.Dataset
    if not _holds_token_ids(next(iter(dataset), None) if is_list else dataset):
        return None
    try:
        # np.array copies: torch would warn about a read-only array
        rows = [row if isinstance(row, torch.Tensor) else torch.from_numpy(np.array(row)) for row in dataset]
        ids = torch.stack(rows).cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"Token ids need shape (N, L), rows of equal length: {error}.") from error
    if ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex() or ids.dim() != 2 or not ids.numel():
        raise ValueError(f"Token ids need to be integers of shape (N, L), but are {ids.dtype} of {tuple(ids.shape)}.")
    if seq_length not in (None, ids.shape[1]):
        raise ValueError(f"seq_length={seq_length}, but the sequences of token ids have {ids.shape[1]} tokens.")
    for token in padding:
        padded = (ids[:, :2] == token).all(dim=1) | (ids[:, -2:] == token).all(dim=1)
        if bool(padded.any()):
            raise ValueError(
                f"{int(padded.sum())} of {len(ids)} rows of token ids are padded with token {token}: pass rows without padding, "
                "or the text itself."
            )
    return ids.to(torch.int64)


def _holds_token_ids(row: Any) -> bool:
    """Return False for a text, a list or array of texts, and a conversation."""
    if isinstance(row, (list, tuple)):
        return len(row) > 0 and not isinstance(row[0], (str, Mapping))
    return isinstance(row, torch.Tensor) or isinstance(row, np.ndarray) and row.dtype.kind not in "OSU"


def check_vocabulary(ids: torch.Tensor, vocab_size: int) -> None:
    """Raise `ValueError` if an id lies outside [0, vocab_size)."""
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"Token ids range from {low} to {high}, but the model's vocabulary has {vocab_size} entries: use the model's own "
            "tokenizer."
        )


def resolve_seq_length(model_config, seq_length: int | None = None) -> int:
    """Return the sequence length to use with a model: the given one, else 2048 or the model's maximum if that is less."""
    text = model_config.get_text_config()
    most = getattr(text, "max_position_embeddings", None)
    if most and text.model_type in POSITIONS_AFTER_PADDING:
        most -= text.pad_token_id + 1
    if seq_length is None:
        return min(2048, most) if most else 2048
    if seq_length < 2 or (most and seq_length > most):  # one token predicts nothing
        allowed = f"2 to {most}" if most else "at least 2"
        raise ValueError(f"Sequences of {seq_length} tokens do not fit: this model allows {allowed} tokens.")
    return seq_length
