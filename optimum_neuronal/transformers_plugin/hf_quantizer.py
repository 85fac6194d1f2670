"""Importing this module registers the quantizers and configs of this package with transformers."""

from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..checkpoint.packed_files import QUANT_METHOD
from .packed_loading import PackedConfig, PackedQuantizer


register_quantization_config(QUANT_METHOD)(PackedConfig)
register_quantizer(QUANT_METHOD)(PackedQuantizer)


@register_quantization_config("neuronal")
class PruningConfig(QuantizationConfigMixin):
    """Makes a `NeuronALConfig` of a dict with `quant_method="neuronal"`."""

    @classmethod
    def from_dict(cls, config_dict, return_unused_kwargs=False, **kwargs):
        from ..config.neuronal_config import NeuronALConfig  # slow to import, and needed to prune alone

        return NeuronALConfig.from_dict(config_dict, return_unused_kwargs, **kwargs)


@register_quantizer("neuronal")
class NeuronALQuantizer(HfQuantizer):
    """Makes a `PruningQuantizer`, whose module is slow to import."""

    def __new__(cls, quantization_config, **kwargs):
        from .pruning_at_load import PruningQuantizer

        return PruningQuantizer(quantization_config, **kwargs)

    is_serializable = is_trainable = None  # abstract in the base
