"""Recipes: the config's fields in a file, as JSON or YAML, or in the report of a model that was pruned with them."""

import json
from pathlib import Path
from typing import Any

from .validation import check_path


YAML = (".yaml", ".yml")


def read_config_file(path: str | Path) -> dict[str, Any]:
    """The fields that a file holds. Their names and values are checked by the config that is made of them.

    Args:
        path (`str` or `Path`):
            A .json, .yaml or .yml file with fields of the config; or the `neuronal_report.json` of a pruned model,
            whose config is taken.

    Raises:
        `ValueError`: the file is none of these.
        `OSError`: it cannot be read.
    """
    path = Path(check_path("path", path))
    if not path.is_file():
        raise FileNotFoundError(f"The recipe {str(path)!r} does not exist: check its path.")
    text = path.read_bytes()
    try:
        found = _parse(text.decode("utf-8"), path.suffix.lower())
    except ValueError as error:  # what json and yaml raise, and text that is not UTF-8
        raise ValueError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    if isinstance(found, dict) and isinstance(found.get("config"), dict):
        found = found["config"]
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise ValueError(f"{path} holds no fields of the config: expected a mapping, such as sparsity: 0.7.")
    return found


def _parse(text: str, suffix: str) -> Any:
    if suffix not in YAML:
        return json.loads(text)
    import yaml  # transformers and huggingface_hub bring it

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(error) from error
