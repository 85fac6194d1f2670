"""The calibration sequences of a prune: whether any are needed, what they are drawn from, and by which tokenizer."""

from contextlib import suppress
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..config import NeuronALConfig
from ..data.calibration import CalibrationSet, as_token_ids, draw_windows, resolve_seq_length, take_sequences
from ..methods import Methods


def draw_calibration(
    model: PreTrainedModel,
    config: NeuronALConfig,
    methods: Methods,
    tokenizer: PreTrainedTokenizerBase | None = None,
    dataset=None,
    revision: str | None = None,
) -> tuple[CalibrationSet | None, PreTrainedTokenizerBase | None]:
    """The calibration sequences that a config asks for, or those of another dataset.

    Args:
        model (`PreTrainedModel`): whose vocabulary and longest sequence count; its weights need not be loaded.
        config ([`NeuronALConfig`]): how many sequences, of how many tokens, from which dataset.
        methods ([`Methods`]): of the config.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): for text. None: the one of the model's own checkpoint.
        dataset (*optional*): instead of the config's: text of any kind that [`load_documents`] takes, or token ids.
        revision (`str`, *optional*): of the model on the Hub, if its tokenizer is to be loaded.

    Returns:
        `tuple`: the sequences, None if saliency and top-up look at weights alone; and the tokenizer, which is the one
        given unless it was None and had to be loaded.

    Raises:
        `ValueError`: no dataset, no tokenizer for text, or sequences that the model does not admit; and what
            [`draw_windows`] and [`take_sequences`] raise.
    """
    if not methods.needs_calibration:
        return None, tokenizer
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
        return calibration, tokenizer
    tokenizer = tokenizer or own_tokenizer(model, revision)
    calibration = draw_windows(
        dataset,
        tokenizer,
        num_samples=config.num_samples,
        seq_length=resolve_seq_length(model.config, config.seq_length),
        seed=config.seed,
        vocab_size=vocab_size,
    )
    return calibration, tokenizer


def own_tokenizer(model: PreTrainedModel, revision: str | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer of the model's own checkpoint.

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
    """The tokenizer of a checkpoint, None if it has none: text alone needs one.

    Args:
        model_or_path (`str` or `Path`): Hub id or directory.
        options: for `AutoTokenizer.from_pretrained`: `revision`, `token`, `trust_remote_code`.
    """
    with suppress(OSError, ValueError):
        return AutoTokenizer.from_pretrained(model_or_path, **options)
    return None
