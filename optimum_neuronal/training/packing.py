"""Training sequences: the documents of a dataset in random order, joined and cut."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..common.notes import get_logger
from ..data.calibration import check_vocabulary, text_tokenizer, tokenize, with_bos
from ..data.documents import iterate_documents


logger = get_logger(__name__)

HELD_OUT = 16  # sequences to measure on during the training


@dataclass(frozen=True)
class TrainingText:
    """Sequences of token ids, int64, on the CPU, and their origin."""

    windows: torch.Tensor  # (sequences, seq_length), to train on
    held_out: torch.Tensor  # (up to 16, seq_length), not trained on
    source: str  # the dataset

    @property
    def sha256(self) -> str:
        """The hash of the token ids to train on."""
        return hashlib.sha256(self.windows.numpy().astype("<i8").tobytes()).hexdigest()


def mix_texts(datasets: Sequence[Any], tokenizer: Any, count: int, **how: Any) -> TrainingText:
    """Return the sequences of [`pack_text`]. Several datasets have equal parts, for which short ones are repeated."""
    share = math.ceil(count / len(datasets))
    texts = [pack_text(dataset, tokenizer, share, **how) for dataset in datasets]
    if len(texts) == 1:
        return texts[0]
    parts = [text.windows[torch.arange(share) % len(text.windows)] for text in texts]
    held_out = [text.held_out[: math.ceil(HELD_OUT / len(texts))] for text in texts]
    windows = torch.stack(parts, dim=1).flatten(0, 1)[:count]
    return TrainingText(windows, torch.cat(held_out), " and ".join(text.source for text in texts))


def pack_text(
    dataset: Any,
    tokenizer: Any,
    count: int,
    *,
    seq_length: int,
    seed: int,
    vocab_size: int,
    bos: int | None = None,
) -> TrainingText:
    """Return up to `count` sequences to train on, and some to measure on.

    The documents, or conversations rendered by the chat template, come in an order that the seed decides, each document
    followed by the tokenizer's end-of-text token. They are cut without overlap. The first sequences are held out: 16, or a
    tenth if the dataset holds less than 160. With `bos`, see [`resolve_bos`], every sequence is this token and a window
    that is one token shorter.
    """
    stream, ids = iterate_documents(dataset, seed, tokenizer), []
    length, end = seq_length - (bos is not None), getattr(text_tokenizer(tokenizer), "eos_token_id", None)
    for text in stream.texts:
        ids += tokenize(text, tokenizer, bos, stream.rendered)
        if end not in (None, *ids[-1:]) and not stream.rendered:  # some tokenizers and all chat templates end texts
            ids.append(end)
        if len(ids) >= max(HELD_OUT + count, 10 * HELD_OUT) * length:
            break
    found = len(ids) // length
    if found < 2:
        raise ValueError(
            f"The dataset ({stream.source}) holds {len(ids)} tokens: expected at least two sequences of {seq_length}. Give "
            "more text, or lower seq_length."
        )
    windows = with_bos(torch.tensor(ids[: min(found, HELD_OUT + count) * length]).view(-1, length), bos)
    check_vocabulary(windows, vocab_size)
    held_out = min(HELD_OUT, max(1, found // 10))
    if found - held_out < count:
        logger.warning(
            f"The dataset ({stream.source}) holds {found - held_out} sequences of {seq_length} tokens to train on, and "
            f"{count} are needed: they are repeated."
        )
    return TrainingText(windows[held_out : held_out + count], windows[:held_out], stream.source)
