"""`TokenWindows`: what models read. And what fits a model: BOS tokens, vocabularies and sequence lengths."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from .documents import text_tokenizer


# Families (`model_type`) whose position ids start after the padding id.
POSITIONS_AFTER_PADDING = ("camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod")  # fmt: skip


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
        names = ("source", "drawn_from", "seed", "sampling", "add_bos")
        num_samples, seq_length = self.ids.shape
        sizes = {"num_samples": num_samples, "seq_length": seq_length, "sha256": self.sha256}
        return {name: getattr(self, name) for name in names} | sizes


def interleave(parts: Sequence[TokenWindows], count: int, held_out: int) -> TokenWindows:
    """Return `count` windows of several datasets, in turn. Those of short ones are repeated.

    Each dataset has the same share, and at least its share of `held_out` windows, if it has so many.
    """
    if len(parts) == 1:
        return parts[0]
    share, share_held_out = math.ceil(count / len(parts)), math.ceil(held_out / len(parts))
    rows = [part.ids[torch.arange(share) % len(part.ids)] for part in parts]
    others = [part.held_out[:share_held_out] for part in parts if part.held_out is not None]
    return replace(
        parts[0],
        ids=torch.stack(rows, dim=1).flatten(0, 1)[:count],
        source=" and ".join(part.source for part in parts),
        drawn_from=" and ".join(dict.fromkeys(part.drawn_from for part in parts)),
        held_out=torch.cat(others) if others else None,
    )


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


def resolve_seq_length(model_config: Any, seq_length: int | None = None) -> int:
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
