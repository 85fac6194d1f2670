"""Prunes a model at load: `from_pretrained(..., quantization_config=NeuronALConfig(...))`."""

from pathlib import Path

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ..checkpoint.sparsity_config import read_sparsity_config
from ..compat import hf_private
from ..config.neuronal_config import NeuronALConfig
from ..pruner import NeuronALPruner
from ..pruning.calibrating import draw_calibration
from ..pruning.check import check


class PruningQuantizer(hf_private.EarlyQuantizer):
    """Prunes a model after transformers has loaded it. The result is a plain model.

    Args:
        quantization_config ([`NeuronALConfig`]): how to prune.

    Raises:
        `ValueError`: the checkpoint's own config.json asks for it.
    """

    def __init__(self, quantization_config: NeuronALConfig, **kwargs):
        super().__init__(quantization_config, **kwargs)
        if self.pre_quantized:
            raise ValueError(
                "config.json has a NeuronALConfig as its quantization_config. Remove it there, and pass it as "
                "from_pretrained(..., quantization_config=NeuronALConfig(...))."
            )

    def see_config(self, config: PreTrainedConfig) -> None:
        """Raise `ValueError` if the model is sparse already."""
        if read_sparsity_config(config) is not None:
            raise ValueError(
                f"{config.name_or_path or 'The model'} is pruned already: its config has a sparsity_config. Load the dense "
                "model, or pass sparsity_config=None to from_pretrained to prune it further."
            )

    def preprocess_model(self, model: PreTrainedModel, checkpoint_files: list[str] | None = None, **_) -> None:
        """Find errors before weights are read, and draw the calibration sequences."""
        hf_private.forget_quantization(model)
        config = self.quantization_config
        check(model, config, loaded=False)
        with torch.device("cpu"):  # this hook runs under torch.device("meta")
            revision = _revision(checkpoint_files)
            self._calibration = draw_calibration(model, config, revision=revision)
        self._pruner = NeuronALPruner(config)

    def postprocess_model(self, model: PreTrainedModel, **_) -> PreTrainedModel:
        hf_private.forget_quantization(model)
        return self._pruner.prune(model, self._calibration)

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True


def _revision(checkpoint_files: list[str] | None) -> str | None:
    """Return the commit of files in the Hub's cache: models--me--llama/snapshots/COMMIT/model.safetensors."""
    parents = Path(checkpoint_files[0]).parents if checkpoint_files else []
    return next((folder.name for folder in parents if folder.parent.name == "snapshots"), None)
