"""The model to evaluate: loaded if it is named by a path or an id on the Hub, and checked."""

import os
from typing import Any

from ..model.load_model import load_model
from ..pruning.prune import find_tokenizer


def as_model(model, tokenizer=None) -> tuple[Any, Any]:
    """Return the model and its tokenizer. A model named by a path or id is loaded in its own dtype."""
    if not isinstance(model, (str, os.PathLike)):
        return model, tokenizer
    tokenizer = find_tokenizer(model) if tokenizer is None else tokenizer
    return load_model(model, dtype="auto"), tokenizer


def check_language_model(model) -> None:
    """Raise `TypeError` or `ValueError` unless a model predicts the next token and has its weights."""
    if not hasattr(model, "get_input_embeddings"):
        raise TypeError(f"model is {model!r:.80}: expected a causal language model of transformers.")
    if not model.can_generate():
        raise ValueError(f"{type(model).__name__} has no language-model head: load it with AutoModelForCausalLM.")
    if model.get_input_embeddings().weight.device.type == "meta" and not hasattr(model, "hf_device_map"):
        raise ValueError("The model's weights are on the meta device: load them before you evaluate it.")
