"""The model to evaluate: loaded if it is named by a path or an id on the Hub, and checked."""

import os
from typing import Any

from ..checkpoint.safe_files import load_checkpoint
from ..compat import hf_private
from ..pruning.calibrating import find_tokenizer


def as_model(model, tokenizer=None) -> tuple[Any, Any]:
    """Return the model and its tokenizer, loaded if the model is named.

    Args:
        model (`PreTrainedModel`, `str` or `Path`): a path or id is loaded in the dtype of its checkpoint.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): None: the tokenizer of a named model, if it has one.
    """
    if not isinstance(model, (str, os.PathLike)):
        return model, tokenizer
    tokenizer = find_tokenizer(model) if tokenizer is None else tokenizer
    return load_checkpoint(model, dtype="auto"), tokenizer


def check_language_model(model, why: str) -> None:
    """Raise unless a model predicts the next token and has its weights.

    Args:
        model: any object.
        why (`str`): the use of a causal language-model head, a clause for the message.

    Raises:
        `TypeError`: not a model of transformers.
        `ValueError`: it has no causal language-model head, or its weights are on the meta device.
    """
    if not hasattr(model, "get_input_embeddings"):
        raise TypeError(f"model is {model!r:.80}: expected a causal language model of transformers.")
    if not model.can_generate():
        raise ValueError(
            f"{type(model).__name__} has no causal language-model head, {why}: if the checkpoint has one, load it with "
            "AutoModelForCausalLM."
        )
    if model.get_input_embeddings().weight.is_meta and not hf_private.has_device_map(model):
        raise ValueError("The model's weights are on the meta device: load them before evaluating it.")
