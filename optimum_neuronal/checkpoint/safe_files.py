"""Opens the files of a checkpoint that may come from anywhere: JSON files, the files of dense weights, and models.

A file is opened only if it is a file, and lies in the checkpoint's directory: a pipe would hang the reader, and a link could
pass on any file of this machine. In the Hub's cache files are links to the cache's own blobs.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers import PreTrainedConfig, PreTrainedModel

from ..common.display import escaped
from ..compat import hf_private
from ..model import load_model
from .names import ADAPTER_FILES, CONFIG, DENSE_FILE, DENSE_INDEX, GENERATION_CONFIG, LISTED_FILE, SUFFIX
from .schema import short


LARGEST = 50 * 10**6  # bytes of a file that is no weights; an index of half a million tensors
DEEPEST = 100  # lists and objects within each other in a JSON file


def check_file(directory: Path, name: str) -> Path:
    """Return the path of a checkpoint's file after checking that it may be opened.

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
    """Raise `ValueError` if config.json may not be opened, or is absurdly large; it may be missing: a config was passed.

    So are the files that transformers reads beside it: the generation config, and adapters.
    """
    if os.path.lexists(directory / CONFIG):
        check_small(directory, CONFIG)
    for name in (GENERATION_CONFIG, *ADAPTER_FILES):
        if os.path.lexists(directory / name):
            check_file(directory, name)


def check_config(config: PreTrainedConfig) -> None:
    """Raise `ValueError` for a config that `from_pretrained` has read, as [`load_model.check_config`] does."""
    attention = {name for name in hf_private.attention_names(config) if "/" in name}
    if attention:
        path = hf_private.find_file(config, CONFIG)
        written = "" if path is None else repr(read_json(path.parent, path.name))
        attention = {name for name in attention if repr(name) in written}  # the caller has passed the others
    load_model.check_config(config, attention)


def _blobs(home: Path) -> Path | None:
    """Return the place of the Hub's cache to which files of a directory models--me--llama/snapshots/COMMIT/... link."""
    commits = (folder for folder in (home, *home.parents) if folder.parent.name == "snapshots")
    return next((commit.parent.parent / "blobs" for commit in commits), None)


def check_names(path: Path, names: Iterable[str]) -> None:
    """Raise `ValueError` if a name of a tensor cannot be shown: errors and progress name tensors."""
    for name in names:
        if not name.isprintable():
            raise ValueError(f"{escaped(path)} is damaged: it names a tensor {escaped(name, 80)!r}.")


def check_header(path: Path) -> None:
    """Compare the sizes and offsets in a safetensors file's header with each other and with the file's size.

    Raises:
        `ValueError`: the file is damaged.
    """
    try:
        with safe_open(path, framework="pt") as file:
            names = file.keys()
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged, or no safetensors file: {escaped(error)}") from error
    check_names(path, names)


def check_small(directory: Path, name: str, largest: int | None = None) -> Path:
    """Return the path of a file, as [`check_file`] does. Raise `ValueError` if it is larger than so many bytes."""
    path = check_file(directory, name)
    size = path.stat().st_size
    if size > (largest or LARGEST):
        raise ValueError(f"{escaped(path)} has {size:,} bytes, more than any such file needs: it is damaged.")
    return path


def read_bytes(directory: Path, name: str, largest: int | None = None) -> bytes:
    """Return the content of a small file of a checkpoint. Raise `ValueError` if it is absurdly large."""
    return check_small(directory, name, largest).read_bytes()


def read_json(directory: Path, name: str) -> dict[str, Any]:
    """Return the object in a JSON file of a checkpoint. Raise `ValueError` if it is damaged, absurdly large or deep."""
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


def _is_deep(value: Any, left: int = DEEPEST) -> bool:
    """Return True if a recursion into a value, to copy or to write it, might not come back."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return left == 0 or any(_is_deep(part, left - 1) for part in parts if isinstance(part, (dict, list)))


def dense_files(directory: Path) -> dict[str, set[str] | None]:
    """Return the name of each file of dense weights -> names of its tensors, None without an index.

    Raises:
        `ValueError`: the index is damaged, or names files elsewhere.
        `FileNotFoundError`: a file is missing.
    """
    files: dict[str, set[str] | None] = {DENSE_FILE: None}
    if not (directory / DENSE_FILE).exists() and (directory / DENSE_INDEX).exists():
        files = dict(read_index(directory, DENSE_INDEX)[0])
    for file in files:
        check_file(directory, file)
    return files


def read_index(directory: Path, name: str) -> tuple[dict[str, set[str]], Any]:
    """Read the index of a checkpoint with several files of weights.

    Returns:
        `tuple`: name of each file, which belongs into the directory -> names of its tensors; and the bytes of all tensors
        that the index names. Neither is checked further.

    Raises:
        `ValueError`: the index is damaged, or names files elsewhere.
    """
    index = read_json(directory, name)
    weight_map, metadata = index.get("weight_map"), index.get("metadata")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{directory / name} is damaged: its 'weight_map' is no object with names of tensors.")
    check_names(directory / name, weight_map)
    files: dict[str, set[str]] = {}
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or not LISTED_FILE.fullmatch(file):
            raise ValueError(
                f"{directory / name} says that {tensor!r} lies in {short(file)}: expected the name of a .safetensors file in "
                "the same directory."
            )
        files.setdefault(file, set()).add(tensor)
    return files, metadata.get("total_size") if isinstance(metadata, dict) else None


def check_dense(directory: str | Path) -> None:
    """Check config.json and the files of dense weights in a directory, if there are any, before transformers opens them."""
    folder = Path(directory or "")
    check_config_file(folder)
    if any(os.path.lexists(folder / name) for name in (DENSE_FILE, DENSE_INDEX)):
        dense_files(folder)


def check_listed(paths: Sequence[str | Path]) -> None:
    """Check the files that transformers is about to read, wherever it has found them, and the headers of safetensors."""
    for path in map(Path, paths):
        check_config_file(path.parent)
        check_file(path.parent, path.name)
        if path.suffix == SUFFIX:
            check_header(path)


def check_model_files(model_or_path: str | os.PathLike[str], kwargs: Mapping[str, Any]) -> None:
    """Check the files of a model before transformers opens any. A model on the Hub has no files here yet.

    Args:
        model_or_path (`str` or `Path`): Hub id or directory of the model.
        kwargs (`Mapping[str, Any]`): for `from_pretrained`.

    Raises:
        `ValueError`: config.json is absurdly large, a file is a pipe or a link out of the directory, or an index damaged.
        `FileNotFoundError`: a file is missing.
    """
    folder = Path(model_or_path, kwargs.get("subfolder") or "")
    if folder.is_dir():
        check_dense(folder)
        load_model.check_has_config(model_or_path, kwargs)


def load_checkpoint(model_or_path: str | Path, **model_kwargs) -> PreTrainedModel:
    """Load a model, as [`load_model.load_model`] does, from a checkpoint that someone else may have made.

    [`check_model_files`] has the arguments and the errors.
    """
    check_model_files(model_or_path, model_kwargs)
    return load_model.load_model(model_or_path, **model_kwargs)
