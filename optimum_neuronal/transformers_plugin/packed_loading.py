"""Loads packed checkpoints (docs/format.md) through transformers' `from_pretrained`, into plain models.

transformers has a quantizer unpack weights by a conversion of the tensors that it has read. That is not used: its
interface differs between the releases that are supported, it would have to be threaded into every family's own
conversions (of experts), and tensors are read ahead without bound, so that packed and unpacked weights would lie in
memory together. Instead transformers is given files that look dense, see [`PackedFile`]: everything it does with a dense
checkpoint it does with this one.
"""

import os
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, modeling_utils
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..checkpoint.packed_index import INDEX, check_shapes, open_checkpoint, read_index
from ..checkpoint.packed_reading import VERSION, PackedFile
from ..checkpoint.packed_writing import QUANTIZATION_CONFIG
from ..checkpoint.save_pretrained import save_packed_by_default
from ..checkpoint.sparsity_config import read_sparsity_config


safe_open = modeling_utils.safe_open


class PackedConfig(QuantizationConfigMixin):
    """The `quantization_config` of a packed checkpoint: `{"quant_method": "neuronal", "format": "packed", "version": 1}`."""

    def __init__(self):
        super().__init__(quant_method="neuronal")

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs):
        """Raises `ValueError` if the checkpoint is of a format or a version that this package does not know."""
        found = config_dict.get("format"), config_dict.get("version")
        if found != ("packed", VERSION):
            raise ValueError(
                f"The checkpoint's quantization_config has format {found[0]!r}, version {found[1]!r}, but this optimum_neuronal "
                f"reads 'packed', version {VERSION}: install a newer one."
            )
        return (cls(), kwargs) if return_unused_kwargs else cls()

    def to_dict(self) -> dict[str, Any]:
        return dict(QUANTIZATION_CONFIG)


# transformers compares this name with that of a config which the user passes, and shows both in its error.
PackedConfig.__name__ = (
    "PackedConfig (the checkpoint is sparse already: load the dense one; or, to prune it further, load it without "
    "quantization_config, del model.config.sparsity_config, and call NeuronALPruner(config).prune(model))"
)


class PackedQuantizer(HfQuantizer):
    """What transformers calls while it loads a packed checkpoint. The model that comes out is not quantized."""

    def __init__(self, quantization_config: PackedConfig, **kwargs):
        super().__init__(quantization_config, **kwargs)
        if not self.pre_quantized:
            raise ValueError("The checkpoint is not packed: load it without quantization_config=PackedConfig().")
        self._files: list[PackedFile] = []

    def update_attn_implementation(self, config):
        """The first hook that sees the model's config: names the file that transformers is to look for."""
        sparsity_config = read_sparsity_config(config)
        if sparsity_config and sparsity_config["format"] != "packed":
            raise ValueError(
                f"The checkpoint's config.json contradicts itself: sparsity_config.format is {sparsity_config['format']!r}, but "
                "its quantization_config is that of a packed checkpoint."
            )
        config.transformers_weights = INDEX
        index = Path(getattr(config, "_name_or_path", "") or "", INDEX)
        if index.is_file():  # else on the Hub
            read_index(index)
        return config

    update_tp_plan = update_attn_implementation  # what releases before that hook call

    def update_ep_plan(self, config):
        return config

    def preprocess_model(self, model: PreTrainedModel, checkpoint_files: list[str], **_) -> None:
        """Checks all headers before a weight is read, and has transformers read the files by [`PackedFile`]."""
        self._files = open_checkpoint(Path(checkpoint_files[0]).parent)
        check_shapes(self._files, model.state_dict())
        checkpoint_files[:] = [_PackedPath(file) for file in self._files]
        modeling_utils.safe_open = _open

    def postprocess_model(self, model: PreTrainedModel, **_) -> PreTrainedModel:
        """Leaves nothing of the loading on the model, but that `save_pretrained` writes what was read: a packed model."""
        if not all(file.was_opened for file in self._files):
            raise RuntimeError(
                "This release of transformers reads checkpoints in a new way, which is not supported yet."
            )
        for attribute in ("quantization_config", "transformers_weights"):
            model.config.__dict__.pop(attribute, None)
        model.__dict__.pop("hf_quantizer", None)
        save_packed_by_default(model)
        return model

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True


class _PackedPath(str):
    """The path of a packed file, for [`_open`] alone: anyone else is told that there is no such file."""

    file: PackedFile

    def __new__(cls, file: PackedFile):
        hint = f"{file.path} (packed: only to be read memory-mapped, without disable_mmap=True).safetensors"
        path = super().__new__(cls, hint)
        path.file = file
        return path


def _open(path: str | os.PathLike, *args, **kwargs):
    """Stands in for safetensors' `safe_open` in transformers; differs from it for packed files only."""
    if not isinstance(path, _PackedPath):
        return safe_open(path, *args, **kwargs)
    path.file.was_opened = True
    return path.file
