"""Calibration sequences: drawn from text by a seed, or taken from token ids."""

import hashlib
import random
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase, ProcessorMixin
from transformers.utils import logging

from .documents import load_documents
from .texts import Documents, is_conversation


# Families (`model_type`) whose first position has the number behind the id of padding.
POSITIONS_BEHIND_PADDING = ("camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod")  # fmt: skip


@dataclass(frozen=True)
class CalibrationSet:
    """Sequences of token ids with their origin.

    Args:
        ids (`Tensor`): int64, shape (num_samples, seq_length), on the CPU.
        source (`str`): the dataset.
        drawn_from (`str`): `"documents"`, `"stream"` (the joined text) or `"token ids"` (given by the caller).
        seed (`int`, *optional*): of the draw; None if nothing was drawn.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): made the ids of the text.
    """

    ids: torch.Tensor
    source: str
    drawn_from: str
    seed: int | None = None
    tokenizer: PreTrainedTokenizerBase | None = field(default=None, repr=False, compare=False)

    def to_dict(self) -> dict:
        """Return the origin for a report, in JSON types, with a `sha256` of the ids."""
        num_samples, seq_length = self.ids.shape
        return {
            "source": self.source,
            "drawn_from": self.drawn_from,
            "seed": self.seed,
            "num_samples": num_samples,
            "seq_length": seq_length,
            "sha256": hashlib.sha256(self.ids.numpy().astype("<i8").tobytes()).hexdigest(),
        }


def take_sequences(ids: torch.Tensor, num_samples: int, vocab_size: int) -> CalibrationSet:
    """Return the first of the caller's sequences of token ids.

    Args:
        ids (`Tensor` of int64, shape (N, L), on the CPU): from [`as_token_ids`].
        num_samples (`int`): sequences to take, at least 1.
        vocab_size (`int`): rows of the model's input embeddings; every id is below it.

    Raises:
        `ValueError`: fewer than `num_samples` rows, or ids outside the vocabulary.
    """
    if len(ids) < num_samples:
        raise ValueError(
            f"The token ids hold {len(ids)} sequences, but num_samples={num_samples}: set num_samples={len(ids)}."
        )
    calibration = CalibrationSet(ids[:num_samples], f"token ids of shape {tuple(ids.shape)}", "token ids")
    check_vocabulary(calibration.ids, vocab_size)
    return calibration


def draw_windows(
    dataset, tokenizer, *, num_samples: int, seq_length: int, seed: int, vocab_size: int
) -> CalibrationSet:
    """Draw calibration sequences from text as Wanda and SparseGPT do: random windows of random documents.

    Documents are visited in random order. Each gives one random window if it is long enough. If these are too few, the
    long documents give further windows, provided that they hold `num_samples * seq_length` tokens together. Otherwise,
    and for datasets of lines (wikitext2, ptb, .txt), windows come from the joined text. Equal arguments give equal ids.
    On each of the three routes, the first sequences do not depend on `num_samples`.

    Args:
        dataset: any kind of text, see `documents`.
        tokenizer (`PreTrainedTokenizerBase`): makes ids of the text.
        num_samples (`int`): sequences to draw, at least 1.
        seq_length (`int`): tokens of each sequence, at least 1.
        seed (`int`): of the draw.
        vocab_size (`int`): rows of the model's input embeddings; every id is below it.

    Raises:
        `ValueError`: too little text (the message says what would work), or ids outside the vocabulary; and what
            [`load_documents`] raises.
    """
    documents, windows = load_documents(dataset, tokenizer=tokenizer), None
    if not documents.joined:
        windows = _draw_from_documents(documents, tokenizer, num_samples, seq_length, random.Random(seed))
    route = "documents" if windows else "stream"
    if not windows:
        stream = tokenize(documents.join(), tokenizer, documents.templated)
        if len(stream) < num_samples * seq_length:
            raise ValueError(
                f"The dataset ({documents.source}) holds {len(stream)} tokens, but {num_samples} sequences of "
                f"{seq_length} need {num_samples * seq_length}: give more text"
                + _settings_that_fit(len(stream), num_samples, seq_length)
            )
        rng = random.Random(seed)
        windows = [_random_window(stream, seq_length, rng) for _ in range(num_samples)]
    calibration = CalibrationSet(torch.tensor(windows), documents.source, route, seed, tokenizer)
    check_vocabulary(calibration.ids, vocab_size)
    return calibration


def _draw_from_documents(
    documents: Documents, tokenizer, num_samples: int, seq_length: int, rng: random.Random
) -> list[list[int]] | None:
    """Return random windows of the documents that are long enough, None if these hold too little text."""
    windows, long = [], []
    with logging.tqdm(total=num_samples, desc="Drawing calibration sequences", leave=False, disable=None) as progress:
        for index in rng.sample(range(len(documents)), len(documents)):
            ids = tokenize(documents[index], tokenizer, documents.templated)
            if len(ids) >= seq_length:
                long.append(ids)
                windows.append(_random_window(ids, seq_length, rng))
                progress.update()
                if len(windows) == num_samples:
                    return windows
    lengths = [len(ids) for ids in long]
    if sum(lengths) < num_samples * seq_length:
        return None
    while len(windows) < num_samples:
        windows.append(_random_window(rng.choices(long, lengths)[0], seq_length, rng))
    return windows


def _settings_that_fit(tokens: int, num_samples: int, seq_length: int) -> str:
    """Return the end of a message on too little text: settings for which these tokens suffice, if there are any."""
    fitting = {"num_samples": tokens // seq_length, "seq_length": tokens // num_samples}
    least = {"num_samples": 1, "seq_length": 2}
    advice = [f"{name} to at most {most}" for name, most in fitting.items() if most >= least[name]]
    if not advice and tokens >= 2:
        advice = [f"num_samples=1 and seq_length={tokens}"]
    return f", or set {' or '.join(advice)}." if advice else "."


def _random_window(ids: list[int], length: int, rng: random.Random) -> list[int]:
    start = rng.randint(0, len(ids) - length)
    return ids[start : start + length]


def tokenize(text: str, tokenizer, templated: bool = False) -> list[int]:
    """Return the token ids of a text of any length, without the tokenizer's warnings.

    Args:
        text (`str`): the text.
        tokenizer (`PreTrainedTokenizerBase` or `ProcessorMixin`): the tokenizer, or the processor that holds it.
        templated (`bool`): True if the text holds all special tokens; otherwise the tokenizer adds its own.

    Raises:
        `TypeError`: not a tokenizer, but a name, for example.
    """
    if not callable(tokenizer):
        raise TypeError(
            f"tokenizer is {tokenizer!r}: expected a tokenizer, such as AutoTokenizer.from_pretrained(...)."
        )
    tokenizer = tokenizer.tokenizer if isinstance(tokenizer, ProcessorMixin) else tokenizer
    added = {"add_special_tokens": False} if templated else {}
    return tokenizer(text, truncation=False, verbose=False, **added)["input_ids"]


def as_token_ids(dataset, seq_length: int | None = None) -> torch.Tensor | None:
    """Return the caller's token ids: int64, shape (N, L), on the CPU. Return None if the dataset is of another kind.

    Args:
        dataset: token ids are a tensor, an array, or a list or tuple of rows.
        seq_length (`int`, *optional*): the expected L, in tokens. None: any.

    Raises:
        `ValueError`: not integers, not of two dimensions, empty, or of another L.
    """
    arrays = (torch.Tensor, np.ndarray)
    is_list = isinstance(dataset, (list, tuple)) and dataset and not is_conversation(dataset[0])
    is_rows = is_list and isinstance(dataset[0], (*arrays, list, tuple))
    if not is_rows and not isinstance(dataset, arrays):
        return None
    expected = "Token ids have to be integers of shape (N, L)"
    try:
        # np.array copies: torch would warn of an array that cannot be written, such as a memory-mapped one
        rows = [row if isinstance(row, torch.Tensor) else torch.from_numpy(np.array(row)) for row in dataset]
        ids = torch.stack(rows).cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{expected}, rows of equal length: {error}.") from error
    if ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex() or ids.dim() != 2 or not ids.numel():
        raise ValueError(f"{expected}, but they are {ids.dtype} of shape {tuple(ids.shape)}.")
    if seq_length not in (None, ids.shape[1]):
        raise ValueError(
            f"The token ids are sequences of {ids.shape[1]}, but seq_length={seq_length}: set seq_length=None or "
            f"seq_length={ids.shape[1]}."
        )
    return ids.to(torch.int64)


def check_vocabulary(ids: torch.Tensor, vocab_size: int) -> None:
    """Raise `ValueError` if an id lies outside [0, vocab_size)."""
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"Token ids run from {low} to {high}, but the model's vocabulary has {vocab_size} entries (0 to "
            f"{vocab_size - 1}): tokenizer and model do not belong together."
        )


def resolve_seq_length(model_config, seq_length: int | None = None) -> int:
    """Return the sequence length to use with a model, in tokens.

    Args:
        model_config (`PreTrainedConfig`): of the model. Without `max_position_embeddings` any length is admitted.
        seq_length (`int`, *optional*): the length to use. None: 2048, or the model's maximum if that is less.

    Raises:
        `ValueError`: `seq_length` is below 1 or beyond the model's maximum.
    """
    text = model_config.get_text_config()
    most = getattr(text, "max_position_embeddings", None)
    if most and text.model_type in POSITIONS_BEHIND_PADDING:
        most -= text.pad_token_id + 1
    if seq_length is None:
        return min(2048, most) if most else 2048
    if seq_length < 1 or (most and seq_length > most):
        admitted = f"1 to {most}" if most else "1 or more"
        raise ValueError(f"seq_length={seq_length}, but this model admits {admitted} tokens: set it in that range.")
    return seq_length
