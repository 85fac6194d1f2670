"""LoRA over packed weights, which stay packed during training."""

from typing import Any

from torch import nn

from ..compat import peft
from ..packed.packed_linear import PackedLinear, is_linear
from ..packed.packed_module import allow_gradients, packed_modules
from .sparse_weights import unwrap


def lora_for_packed(model: nn.Module, config: Any) -> Any:
    """Return a `LoraConfig` that lets PEFT put LoRA around packed linear layers.

    ```python
    model = get_peft_model(model, lora_for_packed(model, LoraConfig(target_modules="all-linear")))
    model = PeftModel.from_pretrained(model, path, config=lora_for_packed(model, path))
    ```

    The result is an ordinary adapter, which also fits the dense model. The backward needs memory for a few unpacked rows. To
    merge adapters, call [`densify`] first, see [`keep_lora_sparse`].

    Args:
        model (`PreTrainedModel`): with packed weights. With dense weights, a copy of the config is returned.
        config (`LoraConfig`): or the path or Hub id of a saved adapter.

    Raises:
        `ImportError`: peft is not installed.
        `TypeError`: not a `LoraConfig`, or not a model.
        `ValueError`: the config trains biases.
    """
    peft.check_peft()
    from ..compat.peft_layers import packed_lora_config

    model, config = unwrap(model), packed_lora_config(config, PackedLinear)
    if next(packed_modules(model), None) is None:
        return config
    if config.bias != "none":
        raise ValueError(
            f"bias={config.bias!r}: biases of packed layers are not trained. Leave it 'none', or call "
            "optimum_neuronal.densify(model) first."
        )
    if isinstance(config.target_modules, str) and config.target_modules.lower() == "all-linear":
        head = getattr(model, "get_output_embeddings", lambda: None)()
        with peft.without_adapters(model):
            modules = [(name, module) for name, module in model.named_modules() if module is not head]
        config.target_modules = {
            name for name, module in modules if isinstance(module, PackedLinear) or is_linear(type(module))
        }
    allow_gradients(model)
    return config
