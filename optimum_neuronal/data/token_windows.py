"""`TokenWindows`: what models read; how BOS, vocabulary and length fit a model; and token ids that the caller passes."""

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from .known_datasets import split_shares


PADDING = 8  # equal tokens at an end of a row that no text has


@dataclass(frozen=True)
class TokenWindows:
    """Sequences of token ids of one length, to calibrate, train or measure on, and their origin."""

    ids: torch.Tensor  # int64, shape (N, L), on the CPU
    source: str  # the dataset
    drawn_from: str = "stream"  # the joined text, "documents", or "token ids" from the caller
    seed: int | None = None  # of the draw; None, here and below, if nothing was drawn
    sampling: str | None = None  # see [`draw_windows`]
    add_bos: bool = False  # True if a BOS token was put at the start of every window
    tokenizer: PreTrainedTokenizerBase | None = field(default=None, repr=False, compare=False)  # that made the ids
    held_out: torch.Tensor | None = field(default=None, repr=False, compare=False)  # other windows, (M, L), or None
    # Dataset, with its share if there are several -> tokens of it.
    dataset_tokens: Mapping[str, int] | None = field(default=None, compare=False)

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.ids.numpy().astype("<i8").tobytes()).hexdigest()

    @property
    def begin_with_bos(self) -> bool:
        """True if every window begins with the tokenizer's BOS token."""
        bos = getattr(text_tokenizer(self.tokenizer), "bos_token_id", None)
        return bos is not None and bool((self.ids[:, 0] == bos).all())

    def to_dict(self) -> dict:
        """Return the origin for a report, in JSON types."""
        names = ("source", "drawn_from", "seed", "sampling", "add_bos", "dataset_tokens")
        num_samples, seq_length = self.ids.shape
        sizes = {"num_samples": num_samples, "seq_length": seq_length, "sha256": self.sha256}
        return {name: getattr(self, name) for name in names} | sizes


def mix(datasets: Sequence[Any], count: int, held_out: int, draw: Callable[[Any, int], TokenWindows]) -> TokenWindows:
    """Return `count` windows of one or more datasets, in turn by their shares, see [`split_shares`].

    `draw` returns up to a number of windows of a dataset, which are repeated if they are fewer, and perhaps others that are
    held out. Up to `held_out` of these are taken by the same shares.
    """
    names, shares = zip(*split_shares(datasets))

    def turns(most: int) -> list[tuple[int, int]]:
        """Return dataset and number of each window. Those of a dataset lie at equal distances."""
        numbers = [(index, n) for index, share in enumerate(shares) for n in range(math.ceil(share * most) + 1)]
        return sorted(numbers, key=lambda one: ((one[1] + 0.5) / shares[one[0]], one[0]))[:most]

    counts = Counter(index for index, _ in turns(count))
    parts = [draw(name, max(1, counts[index])) for index, name in enumerate(names)]
    others = [() if part.held_out is None else part.held_out for part in parts]
    others = [others[index][n] for index, n in turns(held_out) if n < len(others[index])]
    labels = [f"{part.source} ({share:.0%})" if share < 1 else part.source for part, share in zip(parts, shares)]
    tokens: Counter = Counter()  # two files may have one name
    for index, part in enumerate(parts):
        tokens[labels[index]] += counts[index] * part.ids.shape[1]
    return replace(
        parts[0],
        ids=torch.stack([parts[index].ids[n % len(parts[index].ids)] for index, n in turns(count)]),
        source=" and ".join(labels),
        drawn_from=" and ".join(dict.fromkeys(part.drawn_from for part in parts)),
        held_out=torch.stack(others) if others else None,
        dataset_tokens=dict(tokens),
    )


def text_tokenizer(tokenizer: Any) -> Any:
    """Return the tokenizer of a processor, or the given tokenizer."""
    return tokenizer.tokenizer if isinstance(tokenizer, ProcessorMixin) else tokenizer


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


def check_vocabulary(ids: torch.Tensor, vocab_size: int) -> None:
    """Raise `ValueError` if an id lies outside [0, vocab_size)."""
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"Token ids range from {low} to {high}, but the model's vocabulary has {vocab_size} entries: use the model's own "
            "tokenizer."
        )


def longest_sequence(model_config: Any) -> int | None:
    """Return the number of tokens that a model has positions for, None if its config names no limit."""
    return getattr(model_config.get_text_config(), "max_position_embeddings", None)


def resolve_seq_length(model_config: Any, seq_length: int | None = None, what: str = "Sequences of") -> int:
    """Return the sequence length to use with a model: the given one, else 2048 or the model's maximum if that is less."""
    most = longest_sequence(model_config)
    if seq_length is None:
        return min(2048, most) if most else 2048
    if seq_length < 2 or (most and seq_length > most):  # one token predicts nothing
        allowed = f"2 to {most}" if most else "at least 2"
        raise ValueError(f"{what} {seq_length} tokens do not fit: this model allows {allowed} tokens.")
    return seq_length


def take_sequences(ids: torch.Tensor, num_samples: int, vocab_size: int) -> TokenWindows:
    """Return the first `num_samples` of the caller's token ids, int64 of shape (N, L)."""
    if len(ids) < num_samples:
        raise ValueError(f"num_samples={num_samples}, but there are {len(ids)} sequences of token ids.")
    check_vocabulary(ids[:num_samples], vocab_size)
    return TokenWindows(ids[:num_samples], f"token ids of shape {tuple(ids.shape)}", "token ids")


def as_token_ids(dataset: Any, seq_length: int | None = None, padding: Collection[int] = ()) -> torch.Tensor | None:
    """Return a tensor, array or sequence of rows as token ids: int64, shape (N, L), on the CPU; None for other datasets.

    Also take what a tokenizer returns. Raise `ValueError` if its attention mask leaves tokens out, or a row begins or ends
    with eight tokens of `padding`, see [`padding_ids`].
    """
    mask = None
    if isinstance(dataset, Mapping) and "input_ids" in dataset:
        dataset, mask = dataset["input_ids"], dataset.get("attention_mask")
    is_list = isinstance(dataset, Sequence) and not isinstance(dataset, str)  # or a column of a datasets.Dataset
    if not _holds_token_ids(next(iter(dataset), None) if is_list else dataset):
        return None
    # np.array copies: torch would warn about a read-only array
    rows = [row if isinstance(row, torch.Tensor) else torch.from_numpy(np.array(row)) for row in dataset]
    if not rows or any(row.shape != rows[0].shape for row in rows):
        raise ValueError(f"Token ids need shape (N, L), but are {len(rows)} rows, not of equal length.")
    ids = torch.stack(rows).cpu()
    if ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex() or ids.dim() != 2 or not ids.numel():
        raise ValueError(f"Token ids need to be integers of shape (N, L), but are {ids.dtype} of {tuple(ids.shape)}.")
    if seq_length not in (None, ids.shape[1]):
        raise ValueError(f"seq_length={seq_length}, but the sequences of token ids have {ids.shape[1]} tokens.")
    padded = torch.zeros(len(ids), dtype=torch.bool) if mask is None else (torch.as_tensor(mask) == 0).any(dim=1).cpu()
    for token in padding if ids.shape[1] >= PADDING else ():
        padded |= (ids[:, :PADDING] == token).all(dim=1) | (ids[:, -PADDING:] == token).all(dim=1)
    if bool(padded.any()):
        raise ValueError(
            f"{int(padded.sum())} of {len(ids)} rows of token ids are padded: pass rows without padding, or the text itself."
        )
    return ids.to(torch.int64)


def _holds_token_ids(row: Any) -> bool:
    """Return False for a text, a list or array of texts, and a conversation."""
    if isinstance(row, (list, tuple)):
        return len(row) > 0 and not isinstance(row[0], (str, Mapping))
    return isinstance(row, torch.Tensor) or isinstance(row, np.ndarray) and row.dtype.kind not in "OSU"


def padding_ids(model_config: Any, tokenizer: Any = None) -> set[int]:
    """Return the ids that rows may be padded with: padding and end-of-text tokens."""
    sources = (model_config.get_text_config(), text_tokenizer(tokenizer))
    found = [getattr(source, name, None) for source in sources for name in ("pad_token_id", "eos_token_id")]
    return {i for ids in found for i in (ids if isinstance(ids, list) else [ids]) if i is not None}
