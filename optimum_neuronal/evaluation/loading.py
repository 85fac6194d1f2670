"""The model that is evaluated: it may be named instead of loaded, by an id on the Hub or a directory, and is checked."""

import os
from typing import Any

from ..checkpoint.loading import load_checkpoint
from ..compat import transformers as internals
from ..pruning.calibrating import find_tokenizer


def as_model(model, tokenizer=None) -> tuple[Any, Any]:
    """The model with its tokenizer, loaded if it is named; anything else is returned as it came.

    Args:
        model (`PreTrainedModel`, `str` or `Path`): if it is named, it is loaded in the dtype of its checkpoint.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): None: of a model that is loaded, its own, if any.
    """
    if not isinstance(model, (str, os.PathLike)):
        return model, tokenizer
    tokenizer = find_tokenizer(model) if tokenizer is None else tokenizer
    return load_checkpoint(model, dtype="auto"), tokenizer


def check_language_model(model, why: str) -> None:
    """Raises unless a model predicts the next token with weights that it has.

    Args:
        model: what came for one.
        why (`str`): what a causal language-model head is needed for, a clause for the message.

    Raises:
        `TypeError`: no model of transformers.
        `ValueError`: it has no causal language-model head, or its weights are on the meta device.
    """
    if not hasattr(model, "get_input_embeddings"):
        raise TypeError(f"model is {model!r:.80}: expected a causal language model of transformers.")
    if not model.can_generate():
        raise ValueError(
            f"{type(model).__name__} has no causal language-model head, {why}: if the checkpoint has one, load it with "
            "AutoModelForCausalLM."
        )
    if model.get_input_embeddings().weight.is_meta and not internals.has_device_map(model):
        raise ValueError("The model's weights are on the meta device: load them before evaluating it.")
