"""Loads a model whose files were looked at before transformers opens them."""

from pathlib import Path

from transformers import PreTrainedModel

from ..model.load_model import load_model
from .dense_index import check_dense


def load_checkpoint(model_or_path: str | Path, **model_kwargs) -> PreTrainedModel:
    """[`load_model`] for a checkpoint that someone else may have made.

    Args:
        model_or_path (`str` or `Path`): Hub id or directory of the model.
        model_kwargs: for `from_pretrained`.

    Raises:
        `ValueError`: a file of weights that is none, or lies elsewhere: a pipe, a link out of the directory; an index that
            is damaged.
        `FileNotFoundError`: a file is missing.
    """
    check_dense(model_or_path)
    return load_model(model_or_path, **model_kwargs)
