"""Protects the user's files where a checkpoint is to be written."""

import os
from contextlib import suppress
from pathlib import Path

from ..files.directories import check_writable, is_same
from .names import CONFIG, MODEL_CARD
from .packed_files import read_json


# A comment, which readers of the card do not see.
MARK = "<!-- Written by optimum_neuronal, and replaced when a model is saved here again. To keep your edits, remove this line. -->"


def check_output(directory: str | Path, overwrite: bool = False, source: str | Path | None = None) -> Path:
    """Return the absolute path of a directory that a command may write a checkpoint to; never that of the dense `source`."""
    path = check_writable(directory, "save to")
    check_other_directory(source, path)
    if not overwrite and path.is_dir() and any(path.iterdir()) and not _is_pruned(path):
        raise FileExistsError(
            f"{directory} is not empty, and does not hold a pruned model. Choose another directory, or pass --overwrite "
            "to replace the model in it. Other files stay."
        )
    return path


def check_other_directory(source: str | Path | None, output: str | Path) -> None:
    """Raise `FileExistsError` if a model would be saved over the files that it was read from."""
    if source and os.path.isdir(source) and is_same(source, output):
        raise FileExistsError(f"The pruned model would replace the model in {output}. Choose another directory.")


def may_write_card(directory: Path) -> bool:
    """Return True if a directory has no README.md, or one that this package may replace."""
    with suppress(FileNotFoundError):
        return MARK.encode() in (directory / MODEL_CARD).read_bytes()
    return True


def _is_pruned(directory: Path) -> bool:
    with suppress(OSError, ValueError):
        return bool(read_json(directory / CONFIG).get("sparsity_config"))
    return False
