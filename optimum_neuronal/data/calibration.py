"""Draws calibration windows from text with a seed."""

import random
from typing import Any

import torch

from .documents import Documents, load_documents
from .token_windows import TokenWindows, check_vocabulary, with_bos


EXTRA_WINDOWS = 4  # further windows that are drawn, to measure the model on
SPAN = 16  # windows overlap if one holds the other's first or last 16 tokens (a quarter of them, if that is less)


def draw_windows(
    dataset: Any,
    tokenizer: Any,
    *,
    num_samples: int,
    seq_length: int,
    seed: int,
    vocab_size: int,
    sampling: str = "distinct",
    bos: int | None = None,
) -> TokenWindows:
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
    documents, length = load_documents(dataset, tokenizer=tokenizer), seq_length - (bos is not None)
    if sampling == "authors":
        route = "stream" if documents.joined else "documents"
        windows = draw_as_authors(documents, num_samples + EXTRA_WINDOWS, length, seed, bos)
    else:
        route, windows = _draw_distinct(documents, num_samples, length, seed, bos)
    documents.note_lost_turns()
    ids = with_bos(torch.tensor(windows), bos)
    check_vocabulary(ids, vocab_size)
    ids, others = ids.split([num_samples, EXTRA_WINDOWS])
    return TokenWindows(
        ids, documents.source, route, seed, sampling, bos is not None, tokenizer, held_out=_apart(others, ids)
    )


def draw_as_authors(
    documents: Documents, count: int, length: int, seed: int, bos: int | None = None
) -> list[list[int]]:
    """Return `count` windows that the code of NeuronAL's authors (lib/data.py) draws. Lines are joined by a space."""
    rng, texts = random.Random(seed), [" ".join(documents)] if documents.joined else documents
    windows, drawn = [], dict[int, list[int]]()  # index -> token ids; none if they are too few for a window
    while len(windows) < count:
        index = 0 if documents.joined else rng.randint(0, len(texts) - 1)
        if index not in drawn:
            ids = documents.tokenize(texts[index], bos)
            drawn[index] = ids if len(ids) > length else []
        if ids := drawn[index]:
            start = rng.randint(0, len(ids) - length - 1)  # the last window is never drawn
            windows.append(ids[start : start + length])
        elif len(drawn) == len(texts) and not any(drawn.values()):
            raise ValueError(
                f"No text of the dataset ({documents.source}) has more than {length} tokens, as sampling='authors' needs: "
                "lower seq_length, or set sampling='distinct', which joins documents."
            )
    return windows


def _draw_distinct(
    documents: Documents, num_samples: int, length: int, seed: int, bos: int | None
) -> tuple[str, list[list[int]]]:
    """Return what windows are drawn from, and `num_samples + EXTRA_WINDOWS` of them."""
    rng, count, needed = random.Random(seed), num_samples + EXTRA_WINDOWS, num_samples * length
    windows, long = [], []

    def add_window(ids: list[int]) -> None:
        start = rng.randint(0, len(ids) - length)
        windows.append(ids[start : start + length])

    for index in [] if documents.joined else rng.sample(range(len(documents)), len(documents)):
        ids = documents.tokenize(documents[index], bos)
        if len(ids) >= length:
            long.append(ids)
            add_window(ids)
            if len(windows) == count:
                return "documents", windows
    lengths = [len(ids) for ids in long]
    if sum(lengths) >= needed:
        while len(windows) < count:
            add_window(rng.choices(long, lengths)[0])
        return "documents", windows
    stream = documents.tokenize_joined(bos)
    if len(stream) < needed:
        raise ValueError(
            f"The dataset ({documents.source}) holds {len(stream)} tokens, but {num_samples} sequences of {length} need "
            f"{needed}: give more text, or lower num_samples or seq_length."
        )
    rng.seed(seed)
    windows.clear()
    for _ in range(count):
        add_window(stream)
    return "stream", windows


def _apart(windows: torch.Tensor, used: torch.Tensor) -> torch.Tensor | None:
    """Return the windows, (N, L), that do not overlap with a used one, (M, L); None if all do."""
    span = min(SPAN, max(1, used.shape[1] // 4))
    spans, apart = used.unfold(1, span, 1), []
    for window in windows:
        if not any(bool((spans == end).all(dim=-1).any()) for end in (window[:span], window[-span:])):
            apart.append(window)
    return torch.stack(apart) if apart else None
