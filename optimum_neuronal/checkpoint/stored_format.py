"""Which format the weights of a checkpoint have, told by its config.json: one answer for all who read it."""

from collections.abc import Mapping
from typing import Any

from .packed_reading import VERSION, VERSIONS
from .schema import short


QUANT_METHOD = "optimum_neuronal"  # whoever does not know it quotes it: so it is the name of this package
EARLIER_QUANT_METHOD = "neuronal"  # the same, of checkpoints of an earlier release
QUANTIZATION_CONFIG = {"quant_method": QUANT_METHOD, "format": "packed", "version": VERSION}

# In the place of the name of the file with the weights: transformers quotes one that cannot be any before it looks for
# files. With this package the name is replaced first.
HINT = (
    "these weights are packed by optimum_neuronal: write `import optimum_neuronal` before loading them, or make them dense "
    "with `optimum-cli neuronal convert` (pip install optimum-neuronal)"
)


def stored_format(config: Mapping[str, Any], sparsity_config: Mapping[str, Any] | None) -> str:
    """`"dense"` or `"packed"`.

    Args:
        config (`Mapping`): what config.json holds.
        sparsity_config (`Mapping`, *optional*): from [`read_sparsity_config`].

    Raises:
        `ValueError`: packed in a way that this release does not read, or config.json contradicts itself.
    """
    quantization = config.get("quantization_config")
    found = "dense"
    if is_ours(quantization):
        check_packed(quantization)
        found = "packed"
    check_agreement(sparsity_config, found)
    return found


def is_ours(quantization_config: Any) -> bool:
    """Whether what config.json holds under `quantization_config` was written by this package."""
    known = (QUANT_METHOD, EARLIER_QUANT_METHOD)
    return isinstance(quantization_config, dict) and quantization_config.get("quant_method") in known


def check_packed(quantization_config: Mapping[str, Any]) -> None:
    """Raises `ValueError` if the `quantization_config` of a checkpoint is of a format or a version that is not known."""
    format, version = quantization_config.get("format"), quantization_config.get("version")
    if format != "packed" or type(version) is not int or version not in VERSIONS:
        raise ValueError(
            f"The checkpoint's quantization_config has format {short(format)}, version {short(version)}, but this optimum_neuronal "
            f"reads 'packed', versions {VERSIONS[0]} to {VERSIONS[-1]}: install a newer one."
        )


def check_agreement(sparsity_config: Mapping[str, Any] | None, found: str) -> None:
    """Raises `ValueError` if the sparsity_config tells of another format than the weights have."""
    if sparsity_config and sparsity_config["format"] != found:
        raise ValueError(
            f"The checkpoint's config.json contradicts itself: sparsity_config.format is {sparsity_config['format']!r}, but "
            f"its quantization_config is that of a {found} checkpoint."
        )
