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

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..checkpoint.files import check_config_file
from ..checkpoint.names import PACKED_INDEX
from ..checkpoint.packed_index import check_shapes, open_checkpoint, read_index
from ..checkpoint.packed_reading import PackedFile
from ..checkpoint.packed_writing import dense_config
from ..checkpoint.save_pretrained import save_packed_by_default
from ..checkpoint.sparsity_config import KEY, read_sparsity_config
from ..checkpoint.stored_format import QUANTIZATION_CONFIG, check_agreement, check_packed
from ..compat import transformers as internals
from .packed_opening import PackedOpening


class PackedConfig(QuantizationConfigMixin):
    """The `quantization_config` of a packed checkpoint, see docs/format.md."""

    def __init__(self):
        super().__init__(quant_method="neuronal")

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs):
        """Raises `ValueError` if the checkpoint is of a format or a version that this package does not know."""
        check_packed(config_dict)
        return (cls(), kwargs) if return_unused_kwargs else cls()

    def to_dict(self) -> dict[str, Any]:
        return dict(QUANTIZATION_CONFIG)


class _ComparedName(str):
    """The name of a class; comparing it with another class's is an error that says what to do.

    transformers asks nobody when a `quantization_config` is passed for a checkpoint that has one: if the names of the two
    classes differ (`AutoHfQuantizer.merge_quantization_configs`), it raises an error that names them, and no way out.
    """

    def __ne__(self, other: object) -> bool:
        if isinstance(other, str) and str(self) != str(other):
            raise ValueError(_advice(other))
        return super().__ne__(other)


PackedConfig.__name__ = _ComparedName(PackedConfig.__name__)


def _advice(passed: str) -> str:
    """What to do instead of passing a config of a class of this name for a packed checkpoint."""
    if passed == "NeuronALConfig":
        return (
            "The checkpoint is sparse already, and packed: load the dense one; or, to prune it further, load it without "
            "quantization_config, del model.config.sparsity_config, and call NeuronALPruner(config).prune(model)."
        )
    return (
        f"The checkpoint is packed, so that it cannot be loaded with another quantization_config (a {passed}). Convert it "
        "first, with `optimum-cli neuronal convert DIR --format dense --output DENSE_DIR`, and load DENSE_DIR with it."
    )


class PackedQuantizer(internals.EarlyQuantizer):
    """What transformers calls while it loads a packed checkpoint. The model that comes out is not quantized."""

    def __init__(self, quantization_config: PackedConfig, **kwargs):
        super().__init__(quantization_config, **kwargs)
        if not self.pre_quantized:
            raise ValueError("The checkpoint is not packed: load it without quantization_config=PackedConfig().")

    def see_config(self, config: PreTrainedConfig) -> None:
        """Names the file that transformers is to look for, and checks that it and those that it names may be opened."""
        check_agreement(read_sparsity_config(config), "packed")
        internals.look_for_weights(config, PACKED_INDEX)
        index = Path(config.name_or_path or "", PACKED_INDEX)
        if os.path.lexists(index):  # else in a subfolder, or on the Hub
            check_config_file(index.parent)
            read_index(index)

    def preprocess_model(self, model: PreTrainedModel, checkpoint_files: list[str], **_) -> None:
        """Checks all headers before a weight is read, and has transformers read the files by [`PackedFile`]."""
        folder = Path(checkpoint_files[0]).parent
        check_config_file(folder)
        files = open_checkpoint(folder)
        check_shapes(files, model.state_dict())
        self._opening = PackedOpening(self.readers(files), owner=self)
        checkpoint_files[:] = self._opening.paths

    def readers(self, files: list[PackedFile]) -> list[PackedFile]:
        """What transformers is to read the files by."""
        return files

    def postprocess_model(self, model: PreTrainedModel, **_) -> PreTrainedModel:
        """Leaves nothing of the loading on the model, but that `save_pretrained` writes what was read: a packed model."""
        self._opening.end()
        if not self._opening.is_complete:
            raise RuntimeError(
                "This release of transformers reads checkpoints in a new way, which is not supported yet."
            )
        internals.forget_quantization(model)
        if getattr(model.config, KEY, None):  # shared with the model's parts, which save themselves dense
            setattr(model.config, KEY, dense_config({KEY: getattr(model.config, KEY)})[KEY])
        save_packed_by_default(model)
        return model

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True
