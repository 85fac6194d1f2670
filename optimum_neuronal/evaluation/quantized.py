"""Dense models with weights quantised by torchao, to be timed beside packed ones. torchao need not be installed."""

import importlib
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel


MISSING = "pip install torchao"
EAGER = "torchao's layers compute without torch.compile, which its int8 is made for."
GROUPS = (128, 64, 32)  # columns with a common scale, the largest first
ROWS = 64  # of the layer for a trial


def _int8(columns: Collection[int]) -> Iterator[Callable[[], Any]]:
    """Yield the config with one scale for each row."""
    yield lambda: _torchao("quantization").Int8WeightOnlyConfig()


def _int4(columns: Collection[int]) -> Iterator[Callable[[], Any]]:
    """Yield the configs of 4 bits. Each has kernels for some devices, the last for CPUs."""
    group = next((size for size in GROUPS if all(count % size == 0 for count in columns)), None)
    if group is None:
        raise NotQuantized(f"no group of {', '.join(map(str, GROUPS))} columns divides all of its projections")
    yield lambda: _torchao("quantization").Int4WeightOnlyConfig(group_size=group)
    tiled = {"int4_packing_format": "tile_packed_to_4d"}
    yield lambda: _torchao("quantization").Int4WeightOnlyConfig(group_size=group, **tiled)
    yield lambda: _torchao("prototype.quantization.int4").PrototypeInt4WeightOnlyConfig(group_size=group)


FORMS = {"torchao int8": _int8, "torchao int4": _int4}


class NotQuantized(ValueError):
    """The reason, a short phrase, why torchao cannot quantise a model."""


def has_torchao() -> bool:
    """Return True if torchao is installed."""
    try:
        importlib.import_module("torchao")
    except ImportError:
        return False
    return True


def quantize(model: PreTrainedModel, names: Collection[str], form: str) -> PreTrainedModel:
    """Quantise linear layers of a model with torchao, in place, if torchao can compute on the model's device.

    Args:
        model (`PreTrainedModel`): dense.
        names (`Collection[str]`): of the layers.
        form (`str`): of `FORMS`: weight-only, `"torchao int8"` with a scale for each row, or `"torchao int4"` by groups.

    Returns:
        `PreTrainedModel`: the model. Its layers call torchao without `torch.compile`.

    Raises:
        [`NotQuantized`]: torchao cannot. The model's weights are as they were.
    """
    modules = dict(model.named_modules())
    layers: dict[str, Any] = {name: modules.get(name) for name in names}
    for name, layer in layers.items():
        if not isinstance(layer, nn.Linear):  # experts, gpt2's Conv1D
            raise NotQuantized(f"{name} is no nn.Linear")
    first = next(iter(layers.values()))
    config = _find_config(form, {layer.in_features for layer in layers.values()}, first.weight)
    _torchao("quantization").quantize_(model, config, filter_fn=lambda _, name: name in layers)
    return model


def footprint(model: nn.Module) -> int:
    """Return the bytes of a model's parameters and buffers; of tensors that wrap others, the inner ones count."""
    return sum(_nbytes(tensor) for tensors in (model.parameters(), model.buffers()) for tensor in tensors)


def _nbytes(tensor: torch.Tensor) -> int:
    if not hasattr(tensor, "__tensor_flatten__"):
        return tensor.nbytes
    names, _ = tensor.__tensor_flatten__()
    return sum(_nbytes(getattr(tensor, name)) for name in names)


def _torchao(module: str) -> Any:
    return importlib.import_module(f"torchao.{module}")


def _find_config(form: str, columns: Collection[int], weight: torch.Tensor) -> Any:
    """Return the first config of a form that works for layers with these numbers of columns, and such a weight."""
    reasons = []
    for make in FORMS[form](columns):
        try:
            config = make()
            for count in sorted(columns):
                values = torch.linspace(-1, 1, ROWS * count, device=weight.device, dtype=weight.dtype)
                _try(config, values.view(ROWS, count))
            return config
        except Exception as error:  # torchao raises all kinds: AssertionError, ImportError, NotImplementedError
            reasons.append(" ".join(f"{error}".split("\n", 1)[0].split()) or type(error).__name__)
    raise NotQuantized(reasons[0])


@torch.no_grad()
def _try(config: Any, weight: torch.Tensor) -> None:
    """Raise unless torchao quantises a layer with this weight, of shape (ROWS, columns), and computes with it."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight)
    _torchao("quantization").quantize_(layer, config)
    if type(layer.weight) is nn.Parameter:
        raise ValueError(f"weights with {weight.shape[1]} columns are left as they are")
    layer(weight[:1])
