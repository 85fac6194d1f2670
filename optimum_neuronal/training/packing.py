"""Training windows: the documents of datasets in random order, joined and cut."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from ..common.notes import get_logger
from ..data.documents import load_documents
from ..data.token_windows import TokenWindows, check_vocabulary, interleave, text_tokenizer, with_bos


logger = get_logger(__name__)

HELD_OUT = 16  # windows to measure on during the training


def mix_texts(datasets: Sequence[Any], tokenizer: Any, count: int, **how: Any) -> TokenWindows:
    """Return the windows of [`pack_text`]. Several datasets have equal parts, for which short ones are repeated."""
    share = math.ceil(count / len(datasets))
    return interleave([pack_text(dataset, tokenizer, share, **how) for dataset in datasets], count, HELD_OUT)


def pack_text(
    dataset: Any,
    tokenizer: Any,
    count: int,
    *,
    seq_length: int,
    seed: int,
    vocab_size: int,
    bos: int | None = None,
) -> TokenWindows:
    """Return up to `count` windows to train on, and some to measure on.

    The documents, or conversations rendered by the chat template, come in an order that the seed decides, those of streams
    and C4 in their own. Each is followed by the tokenizer's end-of-text token. They are cut without overlap. The first
    windows are held out: 16, or a tenth if the dataset holds less than 160. With `bos`, see [`resolve_bos`], every window
    is this token and a window that is one token shorter.
    """
    documents, ids = load_documents(dataset, "train", tokenizer, streaming=True), []
    length, end = seq_length - (bos is not None), getattr(text_tokenizer(tokenizer), "eos_token_id", None)
    for text in filter(str.strip, documents.shuffled(seed)):
        ids += documents.tokenize(text, bos)
        if end not in (None, *ids[-1:]) and documents.template is None:  # chat templates and some tokenizers end texts
            ids.append(end)
        if len(ids) >= max(HELD_OUT + count, 10 * HELD_OUT) * length:
            break
    found = len(ids) // length
    if found < 2:
        raise ValueError(
            f"The dataset ({documents.source}) holds {len(ids)} tokens: expected at least two sequences of {seq_length}. Give "
            "more text, or lower seq_length."
        )
    windows = with_bos(torch.tensor(ids[: min(found, HELD_OUT + count) * length]).view(-1, length), bos)
    check_vocabulary(windows, vocab_size)
    held_out = min(HELD_OUT, max(1, found // 10))
    if found - held_out < count:
        logger.warning(
            f"The dataset ({documents.source}) holds {found - held_out} sequences of {seq_length} tokens to train on, and "
            f"{count} are needed: they are repeated."
        )
    return TokenWindows(
        windows[held_out : held_out + count], documents.source, add_bos=bos is not None, held_out=windows[:held_out]
    )
