"""What a directory holds that is the user's own: no command writes there unless it is told to."""

import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from transformers import PreTrainedModel

from ..files.directories import is_same
from .card_file import may_be_replaced
from .files import read_json
from .names import CONFIG, FILES, MODEL_CARD, REPORT_NAME, TOKENIZER_FOLDERS, is_of_weights
from .saving import check_directory


SHOWN = 3  # names in an error


def check_output(
    directory: str | Path, overwrite: bool = False, source: str | Path | None = None, own: Collection[str] = ()
) -> Path:
    """Raises before long work what would keep a command from writing a checkpoint to a directory; creates nothing.

    Args:
        directory (`str` or `Path`): may exist or not.
        overwrite (`bool`): whether files of other models in it may be replaced.
        source (`str` or `Path`, *optional*): the model that is read: a Hub id, or a directory, which is never written to.
        own (`Collection[str]`): further names that the command writes to a directory that holds a pruned model.

    Returns:
        `Path`: the same one, absolute.

    Raises:
        `ValueError`, `OSError`: see [`check_directory`].
        `FileExistsError`: it is the model's own directory; or it holds what no command has written, or a model card that
            was edited, and is not to be overwritten.
    """
    path = check_directory(directory)
    if source is not None:
        check_other_directory(source, path)
    if overwrite or not path.is_dir():
        return path
    if foreign := find_foreign(path, own):
        more = f" and {len(foreign) - SHOWN} more" if len(foreign) > SHOWN else ""
        raise FileExistsError(
            f"{directory} holds {', '.join(foreign[:SHOWN])}{more}, which this command did not write: choose another "
            "directory; or give --overwrite, with which a model's files in it are replaced and all others stay."
        )
    if not may_be_replaced(path / MODEL_CARD):
        raise FileExistsError(
            f"{path / MODEL_CARD} was edited since it was written, or is of another make: choose another directory; or give "
            "--overwrite, with which it stays and the new model card is written beside it."
        )
    return path


def check_other_directory(source: str | Path, output: str | Path) -> None:
    """Raises `FileExistsError` if a model would be saved over the files that it was read from."""
    if os.path.isdir(source) and is_same(source, output):
        raise FileExistsError(
            f"{output} is the directory that the model was read from, and would be replaced by the pruned one: choose "
            "another."
        )


def check_not_own(model: PreTrainedModel, output: str | Path) -> None:
    """Raises `FileExistsError` if a model, whose config tells where it was loaded from, would be saved there."""
    if model.config.name_or_path:
        check_other_directory(model.config.name_or_path, output)


def find_foreign(directory: Path, own: Collection[str] = ()) -> list[str]:
    """Names in a directory of what no command has written there, in order.

    Everything, unless it holds a pruned model that was saved with its report: this names the files beside the weights.
    """
    written, names = _written(directory), sorted(entry.name for entry in os.scandir(directory))
    return [name for name in names if not written or not (name in written or name in own or is_of_weights(name))]


def _written(directory: Path) -> set[str]:
    """Names of a saved model's files; of one of an earlier release, whose report does not name them, those it may have."""
    with suppress(ValueError, OSError):
        if read_json(directory, CONFIG).get("sparsity_config"):
            files = read_json(directory, REPORT_NAME).get("files")
            named = files if isinstance(files, list) else []
            return {*FILES, *TOKENIZER_FOLDERS, *(name for name in named if isinstance(name, str))}
    return set()
