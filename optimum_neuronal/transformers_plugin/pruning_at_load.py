"""Prunes a model at load: `from_pretrained(..., quantization_config=NeuronALConfig(...))`.

The module is imported with the package, so what only pruning needs is imported when it starts.
"""

from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..compat import hf_private


METHOD = "neuronal"  # the quant_method of a NeuronALConfig


@register_quantization_config(METHOD)
class PruningConfig(QuantizationConfigMixin):
    """Reads a `NeuronALConfig` from a dict with `quant_method="neuronal"`."""

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        from ..config.neuronal_config import NeuronALConfig

        return NeuronALConfig.from_dict(config_dict, **kwargs)


@register_quantizer(METHOD)
class PruningQuantizer(hf_private.PlainQuantizer):
    """Prunes a model after transformers has loaded it. The result is a plain model."""

    def __init__(self, quantization_config, **kwargs):
        super().__init__(quantization_config, **kwargs)
        if self.pre_quantized:
            raise ValueError(
                "config.json has a NeuronALConfig as its quantization_config. Remove it there, and pass it as "
                "from_pretrained(..., quantization_config=NeuronALConfig(...))."
            )

    def preprocess_model(self, model: PreTrainedModel, checkpoint_files: list[str] | None = None, **_) -> None:
        """Find errors before weights are read, and draw the calibration sequences."""
        from ..pruning.prepare import check_prune, draw_calibration

        hf_private.forget_quantization(model)
        check_prune(model, self.quantization_config, loaded=False)
        with torch.device("cpu"):  # transformers calls this under torch.device("meta")
            revision = _revision(checkpoint_files)
            self._calibration = draw_calibration(model, self.quantization_config, revision=revision)

    def postprocess_model(self, model: PreTrainedModel, **_) -> PreTrainedModel:
        from ..pruner import NeuronALPruner

        hf_private.forget_quantization(model)
        return NeuronALPruner(self.quantization_config).prune(model, self._calibration)


def _revision(checkpoint_files: list[str] | None) -> str | None:
    """Return the commit of files in the Hub's cache: models--me--llama/snapshots/COMMIT/model.safetensors."""
    parents = Path(checkpoint_files[0]).parents if checkpoint_files else []
    return next((folder.name for folder in parents if folder.parent.name == "snapshots"), None)
