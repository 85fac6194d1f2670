"""The files with the weights of a dense checkpoint: which they are, by its index, if it has one, and how they are opened."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .files import check_config_file, check_file, check_names, open_safetensors, read_json
from .names import DENSE_FILE, DENSE_INDEX, LISTED_FILE, SUFFIX
from .schema import short


def dense_files(directory: Path) -> dict[str, set[str] | None]:
    """Name of each file, which may be opened -> names of its tensors, None if nothing tells them.

    Raises:
        `ValueError`: the index is damaged, or names files elsewhere.
        `FileNotFoundError`: a file is missing.
    """
    files = _listed(directory)
    for name in files:
        check_file(directory, name)
    return files


def open_dense(path: Path) -> Any:
    """A file's `safe_open`, whose header was checked. Raises `ValueError` if it is damaged."""
    file = open_safetensors(path)
    check_names(path, file.keys())
    return file


def _listed(directory: Path) -> dict[str, set[str] | None]:
    if (directory / DENSE_FILE).exists() or not (directory / DENSE_INDEX).exists():
        return {DENSE_FILE: None}
    index = directory / DENSE_INDEX
    weight_map = read_json(directory, DENSE_INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index} is damaged: its 'weight_map' is no object with names of tensors.")
    check_names(index, weight_map)
    files: dict[str, set[str] | None] = {}
    for key, name in weight_map.items():
        if not isinstance(name, str) or not LISTED_FILE.fullmatch(name):
            raise ValueError(
                f"{index} says that {key!r} lies in {short(name)}: expected the name of a .safetensors file in the same directory."
            )
        files.setdefault(name, set()).add(key)
    return files


def check_dense(directory: str | Path) -> None:
    """Checks before transformers opens them that the files of a directory are such as `dense_files` admits.

    Where there are none of this name, as with weights of another kind or on the Hub, there is nothing to check.
    """
    folder = Path(directory or "")
    if any(os.path.lexists(folder / name) for name in (DENSE_FILE, DENSE_INDEX)):
        check_config_file(folder)
        dense_files(folder)


def check_listed(paths: Sequence[str | Path]) -> None:
    """Checks the files that transformers is about to read, wherever it has found them, and the headers of safetensors."""
    for path in map(Path, paths):
        check_config_file(path.parent)
        check_file(path.parent, path.name)
        if path.suffix == SUFFIX:
            with open_dense(path):
                pass
