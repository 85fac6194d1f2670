"""The load format of vLLM, which reads packed checkpoints, and its quantization method, whose layers compute packed."""

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from vllm.config import ModelConfig, get_current_vllm_config
from vllm.config.load import LoadConfig
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info, initialize_online_processing
from vllm.model_executor.utils import set_weight_attrs

from ..checkpoint.hub import find_checkpoint
from ..checkpoint.names import QUANT_METHOD
from ..checkpoint.packed_files import check_version, is_packed, read_weights
from ..packed.packed_module import PackedLinear
from ..packed.packed_weight import DTYPES
from ..packed.sparsify import pack_weight


@register_quantization_config(QUANT_METHOD)
class PackedQuantization(QuantizationConfig):
    """The quantization of a packed checkpoint (`packed=True`), or of a dense one with zeros that is packed as it arrives."""

    def __init__(self, packed: bool = False):
        super().__init__()
        self.packed = packed

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "PackedQuantization":
        """Return the quantization of a packed checkpoint. Raise `ValueError` if its version is unknown."""
        check_version(config)
        return cls(packed=True)

    def get_name(self) -> str:
        return QUANT_METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return list(DTYPES)

    @classmethod
    def get_min_capability(cls) -> int:
        return 70

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Return how a layer holds its weight and computes with it; None for layers that stay unchanged."""
        if self.packed and get_current_vllm_config().load_config.load_format != QUANT_METHOD:
            raise ValueError(
                f"The checkpoint is packed by optimum_neuronal: serve it with --load-format {QUANT_METHOD}, or in Python "
                f"with LLM(..., load_format={QUANT_METHOD!r})."
            )
        if isinstance(layer, RoutedExperts):
            raise ValueError(
                "MoE models cannot be served packed: make the checkpoint dense, with `optimum-cli neuronal convert "
                f"DIR --format dense --output DENSE_DIR`, and serve DENSE_DIR without --quantization {QUANT_METHOD}."
            )
        return PackedLinearMethod(prefix) if isinstance(layer, LinearBase) else None


class PackedLinearMethod(LinearMethodBase):
    """A linear layer's method: it holds the weight packed or, if that is not smaller, as vLLM's layers do."""

    uses_meta_device = True  # until vLLM has all of a layer's weights: few layers are in memory dense

    def __init__(self, name: str):
        self.name = name

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **attrs: Any,
    ) -> None:
        """Register a weight without memory. vLLM makes it once all of its parts have arrived."""
        empty = torch.empty(sum(output_partition_sizes), input_size_per_partition, dtype=params_dtype, device="meta")
        layer.register_parameter("weight", nn.Parameter(empty, requires_grad=False))
        set_weight_attrs(layer.weight, {"input_dim": 1, "output_dim": 0, **attrs})
        initialize_online_processing(layer)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Pack the weight. A layer that would not be smaller becomes an ordinary one.

        vLLM calls it when the layer is complete, and again at the end. Raise `ValueError` if a part has not arrived.
        """
        if hasattr(layer, "packed"):
            return
        info = get_layerwise_info(layer)
        if info.load_numel < info.load_numel_total:
            raise ValueError(
                f"{self.name} got {info.load_numel} elements of its weights: expected {info.load_numel_total}. The checkpoint "
                "lacks a weight: download or save it again."
            )
        weight = pack_weight(layer.weight)
        if weight is None:
            layer.quant_method = UnquantizedLinearMethod()
        else:
            layer.packed = PackedLinear(weight)
            # Adapters read its dtype and device. Computing with it fails.
            layer.weight = nn.Parameter(layer.weight.new_empty(0), requires_grad=False)

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return `x @ W.T + bias`, shape (..., rows)."""
        return layer.packed.multiply(x, bias)


@register_model_loader(QUANT_METHOD)
class PackedLoader(DefaultModelLoader):
    """vLLM's default loader, except that it reads packed checkpoints, and checks them."""

    def __init__(self, load_config: LoadConfig):
        super().__init__(replace(load_config, load_format="auto"))
        self.enable_weights_track = True  # a parameter that was not loaded is an error, as in dense models

    def get_all_weights(self, model_config: ModelConfig, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and dense weights, one at a time. Raise `ValueError` if the checkpoint is damaged."""
        if not is_packed(vars(model_config.hf_config)):
            yield from super().get_all_weights(model_config, model)
            return
        self.counter_before_loading_weights = time.perf_counter()
        folder = find_checkpoint(model_config.model, model_config.revision, cache_dir=self.load_config.download_dir)
        for name, weight, header in read_weights(folder, packed=True):
            if header is not None:
                weight = weight.to_dense().mT if header.transposed else weight.to_dense()
            yield name, weight
