"""The calibration sequences of a prune: whether any are needed, what they are drawn from, and by which tokenizer."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import nn
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..config.neuronal_config import NeuronALConfig
from ..data.calibration import CalibrationSet, as_token_ids, draw_windows, resolve_seq_length, take_sequences


def draw_calibration(
    model: PreTrainedModel,
    config: NeuronALConfig,
    tokenizer: PreTrainedTokenizerBase | None = None,
    dataset: Any = None,
    revision: str | None = None,
) -> CalibrationSet | None:
    """Return the calibration sequences that a config asks for, or sequences of another dataset.

    Args:
        model (`PreTrainedModel`): gives the vocabulary and the longest sequence; its weights need not be loaded.
        config ([`NeuronALConfig`]): gives the number of sequences, their tokens, and the dataset.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): for text. None: the one of the model's own checkpoint.
        dataset (*optional*): instead of the config's: text of any kind that [`load_documents`] takes, or token ids.
        revision (`str`, *optional*): of the model on the Hub, if its tokenizer is to be loaded.

    Returns:
        [`CalibrationSet`], *optional*: None if saliency and top-up look at weights alone.

    Raises:
        `ValueError`: no dataset, no tokenizer for text, or sequences that the model does not admit; and what
            [`draw_windows`] and [`take_sequences`] raise.
    """
    if not config.make_methods().needs_calibration:
        return None
    dataset = config.dataset if dataset is None else dataset
    if dataset is None:
        raise ValueError(
            "No calibration data: name a dataset (NeuronALConfig(dataset=...), --dataset), or pass prune(model, dataset=...) "
            "text or token ids."
        )
    vocab_size = model.get_input_embeddings().weight.shape[0]
    ids = as_token_ids(dataset, config.seq_length)
    if ids is not None:
        calibration = take_sequences(ids, config.num_samples, vocab_size)
        resolve_seq_length(model.config, ids.shape[1])
        return calibration
    return draw_windows(
        dataset,
        tokenizer or own_tokenizer(model, revision),
        num_samples=config.num_samples,
        seq_length=resolve_seq_length(model.config, config.seq_length),
        seed=config.seed,
        vocab_size=vocab_size,
    )


def own_tokenizer(model: PreTrainedModel, revision: str | None = None) -> PreTrainedTokenizerBase:
    """Return the tokenizer of the model's own checkpoint.

    Args:
        model (`PreTrainedModel`): its config names the checkpoint that it was loaded from.
        revision (`str`, *optional*): branch, tag or commit on the Hub. None: main.

    Raises:
        `ValueError`: there is none.
    """
    origin = model.config.name_or_path
    message = (
        "Calibration text needs a tokenizer: pass NeuronALPruner(config, tokenizer=...), or save one beside the model."
    )
    if not origin:
        raise ValueError(message)
    try:
        return AutoTokenizer.from_pretrained(origin, revision=revision or "main")
    except (OSError, ValueError) as error:
        raise ValueError(f"{message} None could be loaded from {origin!r}: {error}") from error


def find_tokenizer(model_or_path: str | Path, **options) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer of a checkpoint, None if it has none: only text needs one.

    Args:
        model_or_path (`str` or `Path`): Hub id or directory.
        options: for `AutoTokenizer.from_pretrained`: `revision`, `token`, `trust_remote_code`.
    """
    with suppress(OSError, ValueError):
        return AutoTokenizer.from_pretrained(model_or_path, **options)
    return None


def check_tokenizer(tokenizer: Any) -> None:
    """Raise `TypeError` unless a tokenizer is one, or a name to load it from, or None."""
    is_one = (
        callable(tokenizer) and hasattr(tokenizer, "save_pretrained") and not isinstance(tokenizer, (type, nn.Module))
    )
    if not (is_one or tokenizer is None or isinstance(tokenizer, str)):
        raise TypeError(
            f"tokenizer is a {type(tokenizer).__name__}: expected what AutoTokenizer.from_pretrained returns, or a name."
        )
