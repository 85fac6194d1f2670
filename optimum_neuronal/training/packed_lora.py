"""LoRA beside packed weights: these stay packed while adapters are trained, and gradients pass through them."""

from typing import Any

from torch import nn

from ..compat import peft
from ..packed.packed_linear import PackedLinear, is_linear
from ..packed.packed_module import allow_gradients, packed_modules
from .lora import check_peft
from .sparse_weights import unwrap


ALL = "all-linear"  # PEFT's word for all linear layers but the head


def lora_for_packed(model: nn.Module, config: Any) -> Any:
    """Return a `LoraConfig` by which PEFT puts LoRA around packed linear layers.

    ```python
    model = get_peft_model(model, lora_for_packed(model, LoraConfig(target_modules="all-linear")))
    model = PeftModel.from_pretrained(model, path, config=lora_for_packed(model, path))
    ```

    What is trained and saved is an ordinary adapter, which fits the dense model too. Packed weights take a few rows' scratch
    memory in the backward. Adapters are merged after [`densify`], see [`keep_lora_sparse`].

    Args:
        model (`PreTrainedModel`): with packed weights; with dense ones the config means what it meant.
        config (`LoraConfig`): or the path or Hub id of a saved adapter, whose config is read; not changed.

    Raises:
        `ImportError`: peft is not installed.
        `TypeError`: another config, or no model.
        `ValueError`: the config asks for biases to be trained, which are frozen with the packed weights.
    """
    check_peft()
    model, config = unwrap(model), peft.own_lora_config(config)
    if next(packed_modules(model), None) is None:
        return config
    if config.bias != "none":
        raise ValueError(
            f"bias={config.bias!r}: biases of packed layers are not trained. Leave it 'none', or call "
            "optimum_neuronal.densify(model) first."
        )
    if isinstance(config.target_modules, str) and config.target_modules.lower() == ALL:
        head = getattr(model, "get_output_embeddings", lambda: None)()
        with peft.without_adapters(model):
            modules = [(name, module) for name, module in model.named_modules() if module is not head]
        config.target_modules = {name for name, module in modules if _is_linear(module)}
    allow_gradients(model)
    peft.adapt_packed(config, PackedLinear)
    return config


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, PackedLinear) or is_linear(type(module))
