"""What transformers is told of this package: which class reads a `quant_method` of ours, and which one acts on it.

What transformers holds in memory is always called `"neuronal"`; packed checkpoints are called otherwise, see
`checkpoint.stored_format`, whose name is repeated here since nothing may be imported for it.

`registration` imports this while transformers is imported, hence the imports inside functions: they are of modules that
need all of transformers, and of no more than a load needs.
"""

from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin


@register_quantization_config("neuronal")
@register_quantization_config("optimum_neuronal")
class NeuronALQuantizationConfig(QuantizationConfigMixin):
    """Chooses the class of a dict with such a `quant_method`."""

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
        from .staying_packed import keeps_packed

        if isinstance(quantization_config, PackedConfig) and not keeps_packed():
            return PackedQuantizer(quantization_config, **kwargs)
        from .sparse_loading import KeepingQuantizer, PackingConfig, PackingQuantizer

        if isinstance(quantization_config, PackedConfig):
            return KeepingQuantizer(quantization_config, **kwargs)
        if isinstance(quantization_config, PackingConfig):
            return PackingQuantizer(quantization_config, **kwargs)
        from .pruning_at_load import PruningQuantizer

        return PruningQuantizer(quantization_config, **kwargs)

    is_serializable = is_trainable = None  # never asked: no instance is of this class
