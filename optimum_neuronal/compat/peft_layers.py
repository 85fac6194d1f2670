"""LoRA layers by PEFT's hooks for variants and custom modules. Imports peft: import it where adapters are known to exist."""

import copy
import os
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora.layer import Linear, LoraVariant
from torch import nn
from torch.nn import functional as F

from .buffer_module import BufferModule


OF_WEIGHTS = ("pissa", "olora", "corda", "loftq")  # beginnings of `init_lora_weights` that change the adapted weights


class SparseLora(LoraVariant):
    """LoRA whose update leaves out pruned weights when it is merged, and in the forward too if `exact`.

    Args:
        weight (`training.sparse_weights.SparseWeight`): the weight that the adapter updates.
    """

    def __init__(self, weight: Any, exact: bool):
        self.weight = weight
        self.exact = exact

    def merge_safe(self, module: Any, active_adapter: str, orig_weight: torch.Tensor) -> torch.Tensor:
        return orig_weight + self._update(module, active_adapter).to(orig_weight.dtype)

    def merge_unsafe(self, module: Any, active_adapter: str, orig_weight: torch.Tensor) -> None:
        orig_weight.data += self._update(module, active_adapter)

    def unmerge(self, module: Any, active_adapter: str, orig_weight: torch.Tensor) -> torch.Tensor:
        return orig_weight.data - self._update(module, active_adapter).to(orig_weight.dtype)

    def forward(
        self, module: Any, active_adapter: str, x: torch.Tensor, result: torch.Tensor, **_: Any
    ) -> torch.Tensor:
        x = module.lora_dropout[active_adapter](x)
        lora_a, lora_b = module.lora_A[active_adapter], module.lora_B[active_adapter]
        scaling = module.scaling[active_adapter]
        if not self.exact:
            return result + lora_b(lora_a(x)) * scaling
        update = self._update(module, active_adapter)
        result = result + F.linear(x, update.T if module.fan_in_fan_out else update)
        return result if lora_b.bias is None else result + lora_b.bias * scaling

    def _update(self, module: Any, adapter: str) -> torch.Tensor:
        """Return the masked update in the layout of the weight."""
        with torch.autocast(self.weight.owner.device.type, enabled=False):  # merging happens without it
            return self.weight.masked(module.get_delta_weight(adapter))


def make_sparse(layer: nn.Module, weight: Any, exact: bool | None) -> bool:
    """Let the adapters of a layer keep the zeros of the weight that it updates; return False if PEFT has no hook for it.

    With `exact=None`, adapters that keep them already do not change, and the others are not exact.
    """
    if not isinstance(layer, Linear) or any(not isinstance(v, SparseLora) for v in layer.lora_variant.values()):
        return False
    new = [name for name in layer.lora_A if exact is not None or name not in layer.lora_variant]
    layer.lora_variant |= {adapter: SparseLora(weight, bool(exact)) for adapter in new}
    return True


def is_sparse(layer: Any) -> bool:
    """Return True if all adapters of a layer keep zeros already."""
    variants = getattr(layer, "lora_variant", {})
    return bool(variants) and all(isinstance(variants.get(adapter), SparseLora) for adapter in layer.lora_A)


class PackedLora(Linear):
    """A LoRA layer around a packed linear layer."""

    def __init__(self, base_layer: Any, adapter_name: str, config: Any, **kwargs: Any):
        base = base_layer.get_base_layer() if hasattr(base_layer, "get_base_layer") else base_layer
        config.fan_in_fan_out = base.transposed  # as PEFT does it for dense layers
        kwargs["is_target_conv_1d_layer"] = base.transposed
        super().__init__(base_layer, adapter_name, config=config, **kwargs)

    def _is_packed(self) -> bool:
        return isinstance(self.get_base_layer(), BufferModule)

    def _get_in_out_features(self, module: Any) -> tuple[int, int]:
        return module.in_features, module.out_features

    def resolve_lora_variant(self, *, config: Any, **kwargs: Any) -> Any:
        variant = super().resolve_lora_variant(config=config, **kwargs)
        if variant is not None and self._is_packed():
            raise ValueError(
                f"The adapter is a {type(variant).__name__}, but packed weights support LoRA and rsLoRA only: change the "
                "LoraConfig, or call optimum_neuronal.densify(model) first."
            )
        return variant

    def merge(self, *args: Any, **kwargs: Any) -> None:
        if self._is_packed():
            raise ValueError(
                "Adapters cannot be merged into packed weights: call optimum_neuronal.densify(model) first, and "
                "optimum_neuronal.keep_lora_sparse(model) to keep the zeros."
            )
        super().merge(*args, **kwargs)


def packed_lora_config(config: Any, kind: type[nn.Module]) -> LoraConfig:
    """Return a copy of a `LoraConfig`, or the config of a saved adapter, that adapts layers of class `kind` as packed."""
    if isinstance(config, (str, os.PathLike)):
        config = LoraConfig.from_pretrained(config)
    if not isinstance(config, LoraConfig):
        raise TypeError(f"The adapter's config is a {type(config).__name__}: packed weights support LoraConfig only.")
    if str(config.init_lora_weights).lower().startswith(OF_WEIGHTS):
        raise ValueError(
            f"init_lora_weights={config.init_lora_weights!r} changes the weights, but packed ones cannot change: leave it True."
        )
    config = copy.deepcopy(config)
    config._register_custom_module({kind: PackedLora})
    return config
