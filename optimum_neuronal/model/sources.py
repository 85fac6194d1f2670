"""Where a model is read from: a directory, a Hub id or a GGUF file. Nothing heavy is imported and nothing is loaded."""

import json
import os
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from ..common.connection import is_connected
from .unread_formats import check_formats


GGUF = ".gguf"
READ = (".safetensors", ".bin", GGUF)  # endings of files of weights
LISTED_FILE = re.compile(r"\w[\w.-]*")  # an index names no paths and no hidden files


def check_directory(path: str | os.PathLike[str]) -> None:
    """Raise `FileNotFoundError` or `ValueError` for a directory that holds no model, or one that is not read."""
    entries = [entry for entry in Path(path).iterdir() if entry.exists()]
    if odd := [entry for entry in entries if not (entry.is_file() or entry.is_dir())]:
        raise ValueError(f"{odd[0]} is not a regular file: remove it.")
    if not any(entry.suffix in READ for entry in entries):
        check_formats([entry.name for entry in entries], path)
    if (Path(path) / "config.json").is_file():
        for index in Path(path).glob("*.index.json"):
            listed_files(index)
    elif find_gguf(path) is None:
        raise FileNotFoundError(f"There is no config.json in {path}: name a model's directory, with merged adapters.")


def listed_files(index: Path) -> list[str]:
    """Return the names of the files in an index of weights. Raise `ValueError` if it is damaged, or names another folder's."""
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
        names = sorted({str(name) for name in content["weight_map"].values()})
        content["metadata"]  # transformers reads it
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{index} is damaged: download or save the checkpoint again.") from error
    if wrong := [name for name in names if not LISTED_FILE.fullmatch(name)]:
        raise ValueError(f"{index} names {wrong[0]!r}: expected a file in the same folder.")
    return names


def find_gguf(path: str | os.PathLike[str]) -> Path | None:
    """Return the GGUF file that a path names, itself or as the only one of a directory without config.json; else None."""
    path = Path(path)
    if path.is_file():
        return path if path.suffix.lower() == GGUF else None
    if not path.is_dir() or (path / "config.json").is_file():
        return None
    files = sorted(file for file in path.iterdir() if file.suffix.lower() == GGUF)
    if len(files) > 1:
        raise ValueError(f"{path} holds {len(files)} GGUF files: name one of them, such as {files[0]}.")
    return files[0] if files else None


class Source(NamedTuple):
    """Where a model is read from, checked by [`locate`], and the options of `from_pretrained`."""

    path: str | os.PathLike[str]
    options: dict[str, Any]


def locate(path: str | os.PathLike[str] | Source, options: Mapping[str, Any]) -> Source:
    """Return the directory or Hub id of a model, and options of `from_pretrained`, with `gguf_file` for a GGUF file.

    A `subfolder` becomes a part of the directory, so that the model's config names the place of its files. A `Source` is not
    checked again.
    """
    if isinstance(path, Source):
        return Source(path.path, {**path.options, **options})
    options, name = dict(options), os.fspath(path)
    if os.path.isdir(path):
        subfolder = options.pop("subfolder", None)
        path = Path(path) / subfolder if subfolder else path
        if not options.get("gguf_file"):
            check_directory(path)
    elif not os.path.exists(path) and (name.startswith((".", "~", os.sep)) or name.lower().endswith(GGUF)):
        raise FileNotFoundError(f"{name} does not exist: name the directory of a model, a {GGUF} file or a Hub id.")
    elif not os.path.exists(path) and not is_connected():
        # Otherwise huggingface_hub retries for half a minute for each optional file, even if all are in the cache.
        options["local_files_only"] = True
    file = None if options.get("gguf_file") else find_gguf(path)
    if file is not None:
        path, options = file.parent, options | {"gguf_file": file.name}
    if options.get("gguf_file") and find_spec("gguf") is None:
        raise ImportError(f"Reading {options['gguf_file']} needs gguf: pip install 'optimum-neuronal[gguf]'")
    return Source(path, options)
