"""The seam to transformers: what its `from_pretrained` calls for `quantization_config=NeuronALConfig(...)`, and for a
packed checkpoint.

`registration` imports this when transformers is imported, hence the imports inside functions: they are of modules that
need all of transformers.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin


if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..config import NeuronALConfig


@register_quantization_config("neuronal")
class NeuronALQuantizationConfig(QuantizationConfigMixin):
    """Chooses the class of a dict with `"quant_method": "neuronal"`."""

    @classmethod
    def from_dict(cls, config_dict, return_unused_kwargs=False, **kwargs):
        if "sparsity" in config_dict:
            from ..config import NeuronALConfig as chosen
        else:
            from .packed_loading import PackedConfig as chosen
        return chosen.from_dict(config_dict, return_unused_kwargs, **kwargs)


@register_quantizer("neuronal")
class NeuronALQuantizer(HfQuantizer):
    """Chooses the quantizer that goes with the config."""

    def __new__(cls, quantization_config, **kwargs):
        from .packed_loading import PackedConfig, PackedQuantizer

        return (PackedQuantizer if isinstance(quantization_config, PackedConfig) else PruningQuantizer)(
            quantization_config, **kwargs
        )

    is_serializable = is_trainable = None  # never asked: no instance is of this class


class PruningQuantizer(HfQuantizer):
    """Prunes a model when transformers has loaded it. The model that comes out is not quantized.

    Args:
        quantization_config ([`NeuronALConfig`]): how to prune.

    Raises:
        `ValueError`: the checkpoint's own config.json asks for it.
    """

    def __init__(self, quantization_config: "NeuronALConfig", **kwargs):
        super().__init__(quantization_config, **kwargs)
        if self.pre_quantized:
            raise ValueError(
                "The checkpoint's config.json has a NeuronALConfig as its quantization_config. Remove it there, and pass "
                "it to from_pretrained: from_pretrained(..., quantization_config=NeuronALConfig(...))."
            )

    def update_attn_implementation(self, config):
        """The first hook that sees the model's config. Raises `ValueError` if the model is sparse already."""
        from ..checkpoint.sparsity_config import read_sparsity_config

        if read_sparsity_config(config) is not None:
            raise ValueError(
                f"{config._name_or_path or 'The model'} is sparse already (its config has a sparsity_config). Load the dense "
                "model; or, to prune further, from_pretrained(..., quantization_config=..., sparsity_config=None)."
            )
        return config

    update_tp_plan = update_attn_implementation  # what releases before that hook call

    def update_ep_plan(self, config):
        return config

    def preprocess_model(self, model: "PreTrainedModel", checkpoint_files: list[str] | None = None, **_) -> None:
        """Finds what is wrong before the weights are read, and draws the calibration sequences."""
        from ..pruner import NeuronALPruner
        from ..pruning.calibrating import draw_calibration
        from ..pruning.checking import check_structure

        del model.config.quantization_config
        config = self.quantization_config
        methods = config.make_methods()
        check_structure(model, config, methods)
        with torch.device("cpu"):  # this hook runs under torch.device("meta")
            revision = _revision(checkpoint_files)
            self._calibration, tokenizer = draw_calibration(model, config, methods, revision=revision)
        self._pruner = NeuronALPruner(config, tokenizer)

    def postprocess_model(self, model: "PreTrainedModel", **_) -> "PreTrainedModel":
        model.__dict__.pop("hf_quantizer", None)
        return self._pruner.prune(model, self._calibration)

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True


def _revision(checkpoint_files: list[str] | None) -> str | None:
    """The commit that files in the Hub's cache are of: models--me--llama/snapshots/COMMIT/model.safetensors."""
    parents = Path(checkpoint_files[0]).parents if checkpoint_files else []
    return next((folder.name for folder in parents if folder.parent.name == "snapshots"), None)
