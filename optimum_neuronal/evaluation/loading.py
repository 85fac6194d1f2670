"""What is evaluated may be named instead of loaded: the id of a repository on the Hub, or a directory."""

import os
from typing import Any

from ..checkpoint.loading import load_checkpoint
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
