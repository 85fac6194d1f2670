"""Which files of a checkpoint may be opened, and how its JSON files are read: for all who read one that is someone else's.

A file is opened only if it is a file, and lies in the checkpoint's directory: a pipe would hang the reader, a link could
have it read, and carry along, any file of this machine. In the Hub's cache files are links to the cache's own blobs.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ..display import escaped
from .names import CONFIG


LARGEST = 50 * 10**6  # bytes of a file that is no weights; an index of half a million tensors
DEEPEST = 100  # lists and objects within each other in a JSON file


def check_file(directory: Path, name: str) -> Path:
    """The path of a checkpoint's file, which may be opened.

    Args:
        directory (`Path`): of the checkpoint.
        name (`str`): of the file there; it may lie in a folder of it.

    Raises:
        `FileNotFoundError`: there is none.
        `ValueError`: it is a folder, a pipe or a device, or a link out of the directory. (In the Hub's cache files are
            links to its blobs.)
    """
    path, home = directory / name, Path(directory).resolve()
    if not path.exists():
        raise FileNotFoundError(
            f"{directory} has no file {escaped(name)}: expected a model saved with save_pretrained."
        )
    place = path.resolve()
    if home not in place.parents and place.parent != _blobs(home):
        raise ValueError(
            f"{escaped(path)} is a link to {escaped(place)}, outside of the directory: put the file itself there."
        )
    if not place.is_file():
        raise ValueError(f"{escaped(path)} is no file.")
    return path


def check_config_file(directory: Path) -> None:
    """Raises `ValueError` if config.json is none that may be opened; it may be missing, where a config was passed."""
    if os.path.lexists(directory / CONFIG):
        check_file(directory, CONFIG)


def _blobs(home: Path) -> Path | None:
    """Where the Hub's cache keeps what it links to in a directory: models--me--llama/snapshots/COMMIT/folder."""
    commits = (folder for folder in (home, *home.parents) if folder.parent.name == "snapshots")
    return next((commit.parent.parent / "blobs" for commit in commits), None)


def check_names(path: Path, names: Iterable[str]) -> None:
    """Raises `ValueError` if a name of a tensor is none that can be shown: errors and progress name tensors."""
    for name in names:
        if not name.isprintable():
            raise ValueError(f"{escaped(path)} is damaged: it names a tensor {escaped(name, 80)!r}.")


def open_safetensors(path: Path) -> Any:
    """A file's `safe_open`, which compares all sizes and offsets with each other and with the file's size.

    Raises:
        `ValueError`: the file is damaged.
    """
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged, or no safetensors file: {escaped(error)}") from error


def read_bytes(directory: Path, name: str) -> bytes:
    """What a small file of a checkpoint holds. Raises `ValueError` if it is absurdly large."""
    path = check_file(directory, name)
    size = path.stat().st_size
    if size > LARGEST:
        raise ValueError(f"{escaped(path)} has {size:,} bytes, more than any such file needs: it is damaged.")
    return path.read_bytes()


def read_json(directory: Path, name: str) -> dict[str, Any]:
    """The object that a JSON file of a checkpoint holds. Raises `ValueError` if it is damaged, absurdly large or deep."""
    path, content = escaped(directory / name), read_bytes(directory, name)
    try:
        value = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: it is no JSON text ({error}).") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} is damaged: it holds no object.")
    if _is_deep(value):
        raise ValueError(f"{path} is damaged: lists and objects lie in each other more than {DEEPEST} deep.")
    return value


def _is_deep(value: Any) -> bool:
    """Whether what would recurse into it, to copy or to write it, might not come back."""
    layer = [value]
    for _ in range(DEEPEST):
        layer = [part for whole in layer for part in (whole.values() if isinstance(whole, dict) else whole)]
        layer = [part for part in layer if isinstance(part, (dict, list))]
        if not layer:
            return False
    return True
