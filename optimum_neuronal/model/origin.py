"""What a model's config names as its origin: the id on the Hub and the tokenizer. Reports show no folder of this machine."""

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, StrictDataclassError
from huggingface_hub.utils import validate_repo_id
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from .sources import Source, locate
from .sparsity import read_sparsity_config


# A folder of the Hub's cache: models--OWNER--NAME/snapshots/REVISION
SNAPSHOT = re.compile(r"models--([^/]+)/snapshots/[^/]+/?$")


def hub_id(model: PreTrainedModel) -> str | None:
    """Return the id of the repository on the Hub that a model was loaded from, or None."""
    origin = model.config.name_or_path
    if not origin:
        return None
    if (path := Path(origin)).exists():
        cached = SNAPSHOT.search(path.absolute().as_posix())
        return cached[1].replace("--", "/") if cached else None
    with suppress(HFValidationError):
        validate_repo_id(origin)
        return origin
    return None


def public_name(model: PreTrainedModel) -> str:
    """Return the name of a model for tables: its id on the Hub, the name of its folder without the path, or its class."""
    origin = model.config.name_or_path
    return hub_id(model) or (origin and Path(origin).absolute().name) or type(model).__name__


def checkpoint_folder(model: PreTrainedModel, **options: Any) -> Path | None:
    """Return the folder of a model's checkpoint, or None if it has none. `options`: of `snapshot_download`.

    Unless [`load_model`] loaded the model, the revision is `main`, since transformers does not note another one.
    """
    origin = model.config.name_or_path
    if origin and not os.path.isdir(origin):
        origin = snapshot_download(origin, **{**getattr(model, "checkpoint_place", {}), **options})
    return Path(origin) if origin and Path(origin, "config.json").exists() else None


# Arguments of `from_pretrained` that locate the files of a tokenizer.
TOKENIZER_KWARGS = (
    "cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token", "trust_remote_code",
)  # fmt: skip


def read_base_model(model: str | os.PathLike[str], options: Mapping[str, Any]) -> str:
    """Return the id of the dense model that the config of a sparse one names. Only config.json is read."""
    where = {key: value for key, value in options.items() if key in TOKENIZER_KWARGS}
    in_file, _ = PreTrainedConfig.get_config_dict(model, **where)
    name = (read_sparsity_config(in_file) or {}).get("base_model")
    if name is None:
        raise ValueError(
            "`base_model` is missing from `sparsity_config`: pass the dense model as the teacher (--teacher). Only `finetune` "
            "can do without it: kl_weight=0 (--kl-weight 0) learns from the text alone."
        )
    return name


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
    if "gguf_file" in options:
        tokenizer.name_or_path = os.path.join(model_or_path, options["gguf_file"])  # for errors
    return tokenizer
