"""Loads packed checkpoints (docs/format.md) through transformers' `from_pretrained`, packed.

Empty packed modules take the place of dense ones. Their buffers are named as the tensors in the files. The module is
imported with the package, so what only a packed checkpoint needs is imported when one is loaded.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..checkpoint.names import PACKED_INDEX, QUANT_METHOD
from ..compat import hf_private


if TYPE_CHECKING:
    from ..packed.replacing import PackedHeader


@register_quantization_config(QUANT_METHOD)
class PackedConfig(QuantizationConfigMixin):
    """The `quantization_config` of a packed checkpoint."""

    def __init__(self, format: str | None = None, version: int | None = None, **_: Any) -> None:
        from ..checkpoint.packed_files import check_version

        super().__init__(quant_method=QUANT_METHOD)  # type: ignore[arg-type]
        self.format, self.version = format, version
        check_version(vars(self))


@register_quantizer(QUANT_METHOD)
class PackedQuantizer(hf_private.PlainQuantizer):
    """The quantizer of a packed checkpoint, until the model is loaded."""

    def update_attn_implementation(self, config: PreTrainedConfig) -> PreTrainedConfig:
        """Name the file that transformers looks for. Plain transformers does not find it, and raises an error."""
        setattr(config, hf_private.WEIGHTS_KEY, PACKED_INDEX)
        return config

    def validate_environment(self, device_map: Any = None, **_: Any) -> None:
        """Raise `ValueError` for a device map that offloads weights."""
        places = {str(place) for place in device_map.values()} if isinstance(device_map, dict) else set()
        if "disk" in places or ("cpu" in places and len(places) > 1):
            raise ValueError(
                "device_map offloads some weights, but packed weights have to be in memory. Choose another device_map, or "
                "convert the checkpoint to dense files with `optimum-cli neuronal convert DIR --format dense`."
            )

    def preprocess_model(
        self, model: PreTrainedModel, dtype: torch.dtype | None = None, checkpoint_files: Any = None, **_: Any
    ) -> None:
        """Replace modules with empty packed ones, as the headers of the files say."""
        from ..checkpoint.packed_files import read_headers, weight_files
        from ..packed.replacing import put_empty

        files = sorted(map(Path, checkpoint_files or ()))
        if not files or not _is_inside(files[0], model) or files != weight_files(files[0].parent, packed=True):
            raise ValueError(f"{PACKED_INDEX} does not name the files of this checkpoint: download or save it again.")
        put_empty(model, _renamed(read_headers(files), model), dtype or model.dtype)

    def postprocess_model(self, model: PreTrainedModel, **_: Any) -> PreTrainedModel:
        """Check all packed weights before anything is computed, and remove the marks of a quantized model."""
        from ..packed.packed_module import packed_modules
        from ..packed.sparsify import finish_packing

        for name, module in packed_modules(model):
            try:
                module.check()
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
        hf_private.forget_quantization(model)
        hf_private.forget_conversions(model)
        finish_packing(model)
        return model


def _is_inside(file: Path, model: PreTrainedModel) -> bool:
    """Return True for a file in the directory that a model is loaded from, or in the Hub's cache."""
    folder = model.config.name_or_path
    return not os.path.isdir(folder) or Path(os.path.realpath(file.parent)).is_relative_to(os.path.realpath(folder))


def _renamed(headers: dict[str, "PackedHeader"], model: PreTrainedModel) -> dict[str, "PackedHeader"]:
    """Return headers by the names of a model that is loaded without the head of the checkpoint's model, or with one."""
    prefix = f"{model.base_model_prefix}."
    has_head, is_named = hasattr(model, model.base_model_prefix), any(name.startswith(prefix) for name in headers)
    if has_head == is_named:  # a head that the model lacks is left out, as from a dense checkpoint
        return {
            name: header
            for name, header in headers.items()
            if not is_named or name.startswith(prefix) or hasattr(model, name.partition(".")[0])
        }
    if has_head:
        return {prefix + name: header for name, header in headers.items()}
    return {name[len(prefix) :]: header for name, header in headers.items() if name.startswith(prefix)}
