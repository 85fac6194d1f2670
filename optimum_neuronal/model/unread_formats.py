"""Formats of checkpoints that are not read: they are named, and nothing in them is counted as something else."""

from collections.abc import Iterable, Mapping
from typing import Any


_MASKED = "torch.nn.utils.prune made it. Call its remove(module, 'weight') for each pruned module first"
_BITMASK = "compressed-tensors wrote it. Save it dense, with a release of compressed-tensors before 0.15"
# The end of a file's or a tensor's name, or a format that config.json names -> what it is, and what to do.
UNREAD = {
    "weight_orig": _MASKED,
    "weight_mask": _MASKED,
    "bitmask": _BITMASK,
    "sparse-bitmask": _BITMASK,
    "sparse-24-bitmask": _BITMASK,
    "marlin-24": "it is quantized. Use the model from before it was quantized",
    "onnx": "it is ONNX, as DeepSparse runs it. Use the PyTorch model that was exported",
    "pt": "it is a pickle of PyTorch. Load it with the code that wrote it, and call save_pretrained",
}


def check_formats(names: Iterable[Any], checkpoint: Any) -> None:
    """Raise `ValueError` if a name is of a file, a tensor or a format that is not read."""
    for name in names:
        if why := UNREAD.get(str(name).rpartition(".")[2]):
            raise ValueError(f"{checkpoint} has {name!r}, which is not read: {why}.")


def quantization_of(config: Mapping[str, Any], checkpoint: Any) -> Any:
    """Return the quantization method that a config.json names, or None. Raise `ValueError` for a format that is not read."""
    about = config.get("quantization_config") or _part(config, "text_config").get("quantization_config")
    if not isinstance(about, Mapping):
        return about
    check_formats([about.get("format"), _part(about, "sparsity_config").get("format")], checkpoint)
    return about.get("quant_method")


def _part(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    part = config.get(key)
    return part if isinstance(part, Mapping) else {}
