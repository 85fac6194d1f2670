"""Protects the user's own files: checks the directory that a checkpoint is written to, and keeps the user's README.md."""

import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from ..files.atomic import STAGING
from ..files.directories import check_writable, is_same
from .names import CONFIG, FILES, MODEL_CARD, REPORT_NAME, TOKENIZER_FOLDERS, is_of_weights
from .safe_files import read_json


SHOWN = 3  # names in an error

# A comment, which readers of the card do not see.
MARK = "<!-- Written by optimum_neuronal, and replaced when a model is saved here again. To keep your edits, remove this line. -->"


def is_our_card(card: bytes) -> bool:
    """Return True if this package wrote a card, and nobody has removed the line that says so."""
    return MARK.encode() in card


def may_write_card(directory: Path) -> bool:
    """Return True if a directory has no README.md, or one that this package may replace."""
    with suppress(FileNotFoundError):
        return is_our_card((directory / MODEL_CARD).read_bytes())
    return True


def check_directory(directory: str | Path) -> Path:
    """Return the absolute path of a directory that a model can be saved in; create nothing.

    Raises:
        `ValueError`, `OSError`: the directory cannot be written, see [`check_writable`].
        `FileExistsError`: it holds a folder where a file of a checkpoint belongs.
    """
    path = check_writable(directory, "save to")
    for name in FILES:
        if (path / name).is_dir():
            raise FileExistsError(f"{path / name} is a folder in the way: rename it or choose another directory.")
    return path


def check_output(
    directory: str | Path, overwrite: bool = False, source: str | Path | None = None, own: Collection[str] = ()
) -> Path:
    """Return the absolute path of a directory that a command may write a checkpoint to; create nothing.

    Args:
        directory (`str` or `Path`): may exist or not.
        overwrite (`bool`): True if files of other models in it may be replaced.
        source (`str` or `Path`, *optional*): the model that is read: a Hub id, or a directory, which is never written to.
        own (`Collection[str]`): further names that the command writes to a directory that holds a pruned model.

    Raises:
        `ValueError`, `OSError`: see [`check_directory`].
        `FileExistsError`: it is the model's own directory; or it holds files that no command has written, a README.md
            of the user's among them, and `overwrite` is False.
    """
    path = check_directory(directory)
    check_other_directory(source, path)
    if overwrite or not path.is_dir():
        return path
    if foreign := find_foreign(path, own):
        more = f" and {len(foreign) - SHOWN} more" if len(foreign) > SHOWN else ""
        raise FileExistsError(
            f"{directory} holds {', '.join(foreign[:SHOWN])}{more}, which this command did not write: choose another "
            "directory; or give --overwrite, with which a model's files in it are replaced. All others stay, a README.md of "
            "your own too."
        )
    return path


def check_other_directory(source: str | Path | None, output: str | Path) -> None:
    """Raise `FileExistsError` if a model would be saved over the files that it was read from: its `config.name_or_path`."""
    if source and os.path.isdir(source) and is_same(source, output):
        raise FileExistsError(
            f"{output} is the directory that the model was read from, and would be replaced by the pruned one: choose "
            "another."
        )


def find_foreign(directory: Path, own: Collection[str] = ()) -> list[str]:
    """Return the names in a directory that no command has written there, in order.

    These are all names, unless it holds a pruned model that was saved with its report, which names the files beside the
    weights.
    """
    names = sorted(name for name in os.listdir(directory) if not name.startswith(STAGING))
    try:
        if not read_json(directory, CONFIG).get("sparsity_config"):
            return names
        files = read_json(directory, REPORT_NAME).get("files")
    except (ValueError, OSError):
        return names
    named = [name for name in files if isinstance(name, str)] if isinstance(files, list) else []
    ours = {*FILES, *TOKENIZER_FOLDERS, *named, *own} - (set() if may_write_card(directory) else {MODEL_CARD})
    return [name for name in names if name not in ours and not is_of_weights(name)]
