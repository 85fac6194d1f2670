"""Registers with transformers which class reads a `quant_method` of this package, and which quantizer acts on it.

In memory the method is always `"neuronal"`; packed checkpoints have another name, see `checkpoint.stored_format`, which
is repeated here to import nothing. `registration` imports this while transformers is being imported, hence the imports
inside functions: these modules need all of transformers. A load follows one of these ways:

- a packed checkpoint of sparse weights: `packed_loading`; if some are quantised, or all stay packed: `sparse_model`;
- a dense checkpoint whose weights are packed as they are read: `sparse_model`;
- a dense checkpoint that is pruned: `pruning_at_load`.
"""

from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin


@register_quantization_config("neuronal")
@register_quantization_config("optimum_neuronal")
class NeuronALQuantizationConfig(QuantizationConfigMixin):
    """The config of a dict with this `quant_method`: its class depends on the keys."""

    @classmethod
    def from_dict(cls, config_dict, return_unused_kwargs=False, **kwargs):
        if "sparsity" in config_dict:
            from ..config.neuronal_config import NeuronALConfig as chosen
        else:
            from .packed_loading import PackedConfig as chosen
        return chosen.from_dict(config_dict, return_unused_kwargs, **kwargs)


@register_quantizer("neuronal")
class NeuronALQuantizer(HfQuantizer):
    """The quantizer of a config: its class depends on the config's."""

    def __new__(cls, quantization_config, **kwargs):
        from .packed_loading import PackedConfig, PackedQuantizer, keeps_sparse

        if isinstance(quantization_config, PackedConfig) and not (quantization_config.quantized or keeps_sparse()):
            return PackedQuantizer(quantization_config, **kwargs)
        from .sparse_model import KeepingQuantizer, PackingConfig, PackingQuantizer

        if isinstance(quantization_config, PackedConfig):
            return KeepingQuantizer(quantization_config, **kwargs)
        if isinstance(quantization_config, PackingConfig):
            return PackingQuantizer(quantization_config, **kwargs)
        from .pruning_at_load import PruningQuantizer

        return PruningQuantizer(quantization_config, **kwargs)

    is_serializable = is_trainable = None  # abstract in the base; no instance is of this class
