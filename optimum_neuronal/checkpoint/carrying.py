"""The files beside the weights, which give them their meaning: carried over from the model's checkpoint by one list."""

import shutil
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ..common.notes import get_logger
from ..files.output import leads_out
from ..model.origin import checkpoint_folder, find_tokenizer
from ..model.sources import Source
from .names import CARRIED, TOKENIZER_CONFIG, TOKENIZER_FILES
from .packed_files import read_json, write_json


logger = get_logger(__name__)


def carry_over(model: PreTrainedModel, folder: Path, tokenizer: Any = None, others: Collection[str] = ()) -> None:
    """Copy files of the checkpoint that a model was loaded from, unless they are there, and save a tokenizer.

    A tokenizer that is still the checkpoint's is copied: transformers 5 writes fewer files, which version 4 does not read.
    """
    source, patterns = None, [*CARRIED, *others]
    try:
        source = checkpoint_folder(model, allow_patterns=[*CARRIED, *TOKENIZER_FILES])
    except (OSError, ValueError) as error:
        logger.warning(f"Files beside the weights of {model.config.name_or_path!r} could not be copied: {error}")
    own = source and tokenizer is not None and find_tokenizer(Source(source, {"trust_remote_code": False}))
    if own and _saved(own) == _saved(tokenizer):
        patterns += TOKENIZER_FILES
    for path in sorted({path for pattern in patterns if source for path in source.glob(pattern) if path.is_file()}):
        place = folder / path.relative_to(source)
        if leads_out(path, source):
            logger.warning(f"{path} is a link to a file outside the checkpoint's folder: it is not copied.")
        elif not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, place)
    if tokenizer is not None and not (folder / TOKENIZER_CONFIG).exists():
        tokenizer.save_pretrained(folder)
    _use_older_names(folder)


def _saved(tokenizer: Any) -> dict[str, bytes]:
    """Return the name and content of each file that a tokenizer is saved in."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        _use_older_names(Path(folder))
        return {path.name: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def _use_older_names(folder: Path) -> None:
    """Write a tokenizer's config in the words of transformers 4, which version 5 reads too."""
    path = folder / TOKENIZER_CONFIG
    config = read_json(path) if path.exists() else {}
    if config.get("tokenizer_class") == "TokenizersBackend":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(config.get("extra_special_tokens"), list):
        config["additional_special_tokens"] = config.pop("extra_special_tokens")
    for name in ("is_local", "local_files_only"):  # of the machine
        config.pop(name, None)
    if config:
        write_json(path, config)
