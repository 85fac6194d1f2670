"""Token ids that the caller passes in place of text."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from .documents import text_tokenizer


def as_token_ids(dataset: Any, seq_length: int | None = None, padding: Collection[int] = ()) -> torch.Tensor | None:
    """Return a tensor, array or sequence of rows as token ids: int64, shape (N, L), on the CPU; None for other datasets.

    Raise `ValueError` if a row begins or ends with two tokens of `padding`, see [`padding_ids`].
    """
    is_list = isinstance(dataset, Sequence) and not isinstance(dataset, str)  # or a column of a datasets.Dataset
    if not _holds_token_ids(next(iter(dataset), None) if is_list else dataset):
        return None
    try:
        # np.array copies: torch would warn about a read-only array
        rows = [row if isinstance(row, torch.Tensor) else torch.from_numpy(np.array(row)) for row in dataset]
        ids = torch.stack(rows).cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"Token ids need shape (N, L), rows of equal length: {error}.") from error
    if ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex() or ids.dim() != 2 or not ids.numel():
        raise ValueError(f"Token ids need to be integers of shape (N, L), but are {ids.dtype} of {tuple(ids.shape)}.")
    if seq_length not in (None, ids.shape[1]):
        raise ValueError(f"seq_length={seq_length}, but the sequences of token ids have {ids.shape[1]} tokens.")
    for token in padding:
        padded = (ids[:, :2] == token).all(dim=1) | (ids[:, -2:] == token).all(dim=1)
        if bool(padded.any()):
            raise ValueError(
                f"{int(padded.sum())} of {len(ids)} rows of token ids are padded with token {token}: pass rows without padding, "
                "or the text itself."
            )
    return ids.to(torch.int64)


def _holds_token_ids(row: Any) -> bool:
    """Return False for a text, a list or array of texts, and a conversation."""
    if isinstance(row, (list, tuple)):
        return len(row) > 0 and not isinstance(row[0], (str, Mapping))
    return isinstance(row, torch.Tensor) or isinstance(row, np.ndarray) and row.dtype.kind not in "OSU"


def padding_ids(model_config: Any, tokenizer: Any = None) -> set[int]:
    """Return the ids that rows may be padded with: padding and end-of-text tokens."""
    sources = (model_config.get_text_config(), text_tokenizer(tokenizer))
    found = [getattr(source, name, None) for source in sources for name in ("pad_token_id", "eos_token_id")]
    return {i for ids in found for i in (ids if isinstance(ids, list) else [ids]) if i is not None}
