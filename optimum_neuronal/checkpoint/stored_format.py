"""The format of a checkpoint's weights in its config.json: read and checked in one way, and written."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..compat import hf_private
from .names import CONFIG
from .schema import short


VERSION = 1  # of the packed format
QUANT_METHOD = "optimum_neuronal"  # a program that does not know it quotes it: so it is the name of this package
IN_MEMORY = "neuronal"  # the method's name in models and configs in memory
QUANTIZATION_CONFIG = {"quant_method": QUANT_METHOD, "format": "packed", "version": VERSION}

# In place of the name of the file with the weights: transformers quotes an impossible name before it looks for files.
# With this package the name is replaced first.
HINT = (
    "these weights are packed by optimum_neuronal: write `import optimum_neuronal` before loading them, or let all "
    "programs load them by `optimum-cli neuronal register --on`, or make them dense with `optimum-cli neuronal convert` "
    "(pip install optimum-neuronal)"
)


def stored_format(config: Mapping[str, Any], sparsity_config: Mapping[str, Any] | None) -> str:
    """Return `"dense"` or `"packed"`.

    Args:
        config (`Mapping`): what config.json holds.
        sparsity_config (`Mapping`, *optional*): from [`read_sparsity_config`].

    Raises:
        `ValueError`: the version is unknown, or config.json contradicts itself.
    """
    quantization, found = config.get("quantization_config"), "dense"
    if is_ours(quantization):
        check_packed(quantization)
        found = "packed"
    check_agreement(sparsity_config, found)
    return found


def is_ours(quantization_config: Any) -> bool:
    """Return True if the `quantization_config` of a config.json was written by this package."""
    known = (QUANT_METHOD, IN_MEMORY)
    return isinstance(quantization_config, dict) and quantization_config.get("quant_method") in known


def check_packed(quantization_config: Mapping[str, Any]) -> None:
    """Raise `ValueError` if the `quantization_config` of a checkpoint has an unknown format or version."""
    format, version = quantization_config.get("format"), quantization_config.get("version")
    if format != "packed" or type(version) is not int or version != VERSION:
        raise ValueError(
            f"The checkpoint's quantization_config has format {short(format)}, version {short(version)}, but this optimum_neuronal "
            f"reads 'packed', version {VERSION}: install another one."
        )


def check_agreement(sparsity_config: Mapping[str, Any] | None, found: str) -> None:
    """Raise `ValueError` if the sparsity_config names another format than the weights have."""
    if sparsity_config and sparsity_config["format"] != found:
        raise ValueError(
            f"The checkpoint's config.json contradicts itself: sparsity_config.format is {sparsity_config['format']!r}, but "
            f"its quantization_config is that of a {found} checkpoint."
        )


def packed_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a packed checkpoint's config.json, made from the dense one's."""
    return _with_format(config, "packed") | {"quantization_config": dict(QUANTIZATION_CONFIG)}


def dense_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a dense checkpoint's config.json, made from the packed one's."""
    packed = ("quantization_config", hf_private.WEIGHTS_KEY)
    return {key: value for key, value in _with_format(config, "dense").items() if key not in packed}


def add_hint(folder: Path, quantized: bool) -> None:
    """Add to a packed checkpoint's config.json the sentence that transformers shows where this package is not imported.

    Args:
        folder (`Path`): with config.json.
        quantized (`bool`): True if some weights are of few bits: these stay packed however the checkpoint is loaded.
    """
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    config["quantization_config"] = QUANTIZATION_CONFIG | ({"quantized": True} if quantized else {})
    write_json(folder / CONFIG, config | {hf_private.WEIGHTS_KEY: HINT})


def write_json(path: Path, value: Mapping) -> None:
    """Write a JSON file, its keys in order."""
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _with_format(config: Mapping[str, Any], format: str) -> dict[str, Any]:
    sparsity_config = config.get("sparsity_config")
    return {**config, "sparsity_config": {**sparsity_config, "format": format}} if sparsity_config else dict(config)
