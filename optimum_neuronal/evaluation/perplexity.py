"""Perplexity of a language model on test sets, by the protocol that the papers of this field share."""

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..common.display import display_name
from ..common.notes import progress
from ..common.torch_state import default_batch_size, inference
from ..common.validation import check_count
from ..compat.hf_private import execution_device
from ..data.documents import load_documents
from ..data.token_windows import (
    TokenWindows,
    as_token_ids,
    check_vocabulary,
    padding_ids,
    resolve_bos,
    resolve_seq_length,
    with_bos,
)
from ..model.load_model import load_model
from ..model.origin import find_tokenizer


TestWindows = Mapping[str, TokenWindows]  # by the name of the test set


def evaluate_perplexity(
    model: PreTrainedModel | str | Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    dataset: Any = "wikitext2",
    seq_length: int | None = None,
    *,
    max_windows: int | None = None,
    batch_size: int | None = 1,
    add_bos: bool | None = None,
) -> float:
    """Return the perplexity on the test text of a dataset: `exp(mean NLL)`, at least 1, lower is better.

    The test documents are joined, tokenized once and cut into windows of `seq_length` tokens without overlap; the rest
    is dropped. Every token of a window except the first is predicted from the window alone. wikitext2 joins its test
    split by blank lines, ptb by spaces. c4 takes the first 1100 validation documents and at most 256 windows, as Wanda.

    Args:
        model (`PreTrainedModel`, `str` or `Path`): a causal language model, or where to load it from, in its own dtype.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): not needed for token ids, or if `model` names a checkpoint.
        dataset: any kind that [`load_documents`] takes, token ids of shape (N, L), which are the windows, or the result of
            [`load_windows`]. A Hub dataset without a split gives its test split.
        seq_length (`int`): tokens per window, at least 2. None: the smaller of 2048 and the model's limit.
        max_windows (`int`): measure only the first windows, at most this many. None or 0: all (c4: 256).
        batch_size (`int`): windows per forward. Changes the result by rounding at most. None: of about 2048 tokens.
        add_bos (`bool`):
            True to begin every window of text with the BOS token, which counts as one of its tokens and is not predicted.
            None: for Gemma models, as in lm-eval.

    Raises:
        `ValueError`, `TypeError`: too little text, an unsuitable model or tokenizer, or a loss that is not finite.
    """
    check_count("batch_size", 1 if batch_size is None else batch_size, 1)
    model, tokenizer = as_model(model, tokenizer)
    check_language_model(model)
    embeddings = model.get_input_embeddings()
    windows = load_windows(model.config, tokenizer, dataset, seq_length, max_windows, add_bos).ids
    check_vocabulary(windows, embeddings.weight.shape[0])
    batch_size = batch_size or default_batch_size(windows.shape[1])
    with inference(model):
        mean = _mean_nll(model, windows, batch_size, execution_device(embeddings))
    return as_perplexity(mean)


def as_perplexity(mean_nll: float) -> float:
    """Return `exp(mean NLL)`, infinity if a float cannot hold it."""
    return math.inf if mean_nll > 700 else math.exp(mean_nll)  # exp(710) overflows


def load_windows(
    config: PreTrainedConfig,
    tokenizer: Any,
    dataset: Any,
    seq_length: int | None = None,
    max_windows: int | None = None,
    add_bos: bool | None = None,
) -> TokenWindows:
    """Return the windows of [`evaluate_perplexity`]."""
    if isinstance(dataset, TokenWindows):
        return dataset
    check_count("The length of test windows", 2 if seq_length is None else seq_length, 2)
    check_count("max_windows", 0 if max_windows is None else max_windows, 0)
    ids = as_token_ids(dataset, seq_length, padding_ids(config, tokenizer))
    seq_length = resolve_seq_length(config, seq_length if ids is None else ids.shape[1])
    if ids is not None:
        return TokenWindows(ids[: max_windows or None], "token ids", "token ids", tokenizer=tokenizer)
    if tokenizer is None:
        raise ValueError("Evaluating on text needs a tokenizer: pass it, or token ids of shape (N, L).")
    documents, bos = load_documents(dataset, "test", tokenizer), resolve_bos(config, tokenizer, add_bos)
    stream = torch.tensor(documents.tokenize_joined(bos), dtype=torch.int64)
    documents.note_lost_turns()
    length = seq_length - (bos is not None)
    if len(stream) < length:
        raise ValueError(
            f"The dataset ({documents.source}) holds {len(stream)} tokens, fewer than one window of {seq_length}: give more "
            "text, or a shorter window."
        )
    ids = with_bos(stream.unfold(0, length, length)[: max_windows or documents.max_windows], bos)
    return TokenWindows(ids, documents.source, add_bos=bos is not None, tokenizer=tokenizer)


def name_test_sets(evaluate: Iterable[Any] | Mapping[str, Any]) -> dict[str, Any]:
    """Return name -> test set: a file's name without its folder, `"test 1"` for data in memory, with its number if taken."""
    if isinstance(evaluate, Mapping):
        return dict(evaluate)
    if isinstance(evaluate, (str, os.PathLike)) or not isinstance(evaluate, Iterable):
        raise TypeError(f"evaluate is {evaluate!r}: expected a list of test sets, such as ['wikitext2'].")
    named: dict[str, Any] = {}
    for number, entry in enumerate(evaluate, start=1):
        is_name = isinstance(entry, (str, os.PathLike))
        name = display_name(os.fspath(entry)) if is_name else f"test {number}"
        named[name if name not in named else f"{name} ({number})"] = entry
    return named


def _mean_nll(model: PreTrainedModel, windows: torch.Tensor, batch_size: int, device: torch.device) -> float:
    """Return the mean NLL in nats of all tokens except the first of each window."""
    total, starts = 0.0, range(0, len(windows), batch_size)
    for start in progress(starts, "measuring perplexity", "batch"):
        ids = windows[start : start + batch_size].to(device)
        logits = model(input_ids=ids, use_cache=False).logits
        targets = ids[:, 1:].flatten().to(logits.device)
        loss = cross_entropy(logits[:, :-1].float().flatten(0, 1), targets, reduction="sum").item()
        del logits  # before the next forward
        if not math.isfinite(loss):
            raise ValueError(
                f"The loss is {loss} in windows {start} to {start + len(ids) - 1}: the weights hold NaN, or the dtype "
                "overflows (try bfloat16 or float32)."
            )
        total += loss
    return total / (len(windows) * (windows.shape[1] - 1))


def as_model(model: Any, tokenizer: Any = None) -> tuple[Any, Any]:
    """Return a model and its tokenizer, loaded in the checkpoint's dtype if `model` is a path or id."""
    if not isinstance(model, (str, os.PathLike)):
        return model, tokenizer
    return load_model(model, dtype="auto"), tokenizer or find_tokenizer(os.fspath(model))


def check_language_model(model: Any) -> None:
    """Raise unless a model predicts the next token."""
    if not model.can_generate():
        raise ValueError(f"{type(model).__name__} has no language-model head: load it with AutoModelForCausalLM.")


def load_tests(tests: Mapping[str, Any], model: PreTrainedModel, tokenizer: Any, *how: Any) -> dict[str, TokenWindows]:
    """Return the windows of each test set; `how`: further arguments of [`load_windows`]."""
    return {name: load_windows(model.config, tokenizer, test, *how) for name, test in tests.items()}


def measure(model: PreTrainedModel, tests: TestWindows, batch_size: int | None = None) -> dict[str, float]:
    """Return the perplexity on each test set."""
    return {name: evaluate_perplexity(model, None, test, batch_size=batch_size) for name, test in tests.items()}


def report_tests(tests: TestWindows, **measured: Mapping[str, float]) -> dict[str, dict[str, Any]]:
    """Return what a report holds: test set -> `windows`, `window`, `bos`, and perplexities by when they were measured."""
    return {
        name: {"windows": len(test.ids), "window": test.ids.shape[1], "bos": test.begin_with_bos}
        | {when: values[name] for when, values in measured.items() if name in values}
        for name, test in tests.items()
    }


def digest(tests: TestWindows) -> str:
    """Return a hash of names and token ids, for the name of a record."""
    parts = [[name, *test.ids.shape, test.sha256] for name, test in tests.items()]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
