"""Finds the tokenizer of a checkpoint."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from .sources import Source, locate


# Arguments of `from_pretrained` that locate the files of a tokenizer.
TOKENIZER_KWARGS = (
    "cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token", "trust_remote_code",
)  # fmt: skip


def own_tokenizer(model: PreTrainedModel, revision: str | None = None) -> PreTrainedTokenizerBase:
    """Load the tokenizer of the checkpoint that the model's config names."""
    origin = model.config.name_or_path
    wanted = "Calibration text needs a tokenizer: pass NeuronALPruner(config, tokenizer=...)"
    if not origin:
        raise ValueError(f"{wanted}, or save one with the model.")
    gguf = {"gguf_file": model.gguf_file} if hasattr(model, "gguf_file") else {}
    place = getattr(model, "checkpoint_place", {}) if revision is None else {"revision": revision}
    try:
        return _load_tokenizer(origin, **place, **gguf)
    except (ImportError, OSError, ValueError) as error:
        raise ValueError(f"{wanted}. None could be loaded from {origin!r}: {error}") from error


def find_tokenizer(model_or_path: str | Path | Source, **options) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer of a checkpoint, or None if it has none: only text needs one. Other options are left out."""
    model_or_path, options = locate(model_or_path, options)
    options = {name: value for name, value in options.items() if name in (*TOKENIZER_KWARGS, "gguf_file")}
    with suppress(ImportError, OSError, ValueError, AttributeError, StrictDataclassError):  # also for a damaged config
        return _load_tokenizer(model_or_path, **options)
    return None


def _load_tokenizer(model_or_path: str | os.PathLike[str], **options: Any) -> PreTrainedTokenizerBase:
    """Load a tokenizer. Raise `ValueError` if its files are missing: for some families, transformers makes an empty one."""
    tokenizer = AutoTokenizer.from_pretrained(model_or_path, **options)
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise ValueError("its files are missing")
    return tokenizer
