"""Dense models with weights that torchao quantised, to be timed beside packed ones. torchao need not be installed."""

import importlib
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel


MISSING = "pip install torchao"
EAGER = "torchao's layers compute as they are, without torch.compile, which its int8 is made for."
GROUPS = (128, 64, 32)  # columns that share a scale, the most that fit
ROWS = 64  # of the layer that a form is tried on


def _int8(columns: Collection[int]) -> Iterator[Callable[[], Any]]:
    """One scale for each row."""
    yield lambda: _torchao("quantization").Int8WeightOnlyConfig()


def _int4(columns: Collection[int]) -> Iterator[Callable[[], Any]]:
    """The ways to have 4 bits, of which each has kernels for some devices: the last those for CPUs."""
    group = next((size for size in GROUPS if all(count % size == 0 for count in columns)), None)
    if group is None:
        raise NotQuantized(f"no group of {', '.join(map(str, GROUPS))} columns divides all of its projections")
    yield lambda: _torchao("quantization").Int4WeightOnlyConfig(group_size=group)
    tiled = {"int4_packing_format": "tile_packed_to_4d"}
    yield lambda: _torchao("quantization").Int4WeightOnlyConfig(group_size=group, **tiled)
    yield lambda: _torchao("prototype.quantization.int4").PrototypeInt4WeightOnlyConfig(group_size=group)


FORMS = {"torchao int8": _int8, "torchao int4": _int4}


class NotQuantized(ValueError):
    """torchao cannot quantise a model; why not, in a short phrase."""


def has_torchao() -> bool:
    """Whether torchao is installed."""
    try:
        importlib.import_module("torchao")
    except ImportError:
        return False
    return True


def quantize(model: PreTrainedModel, names: Collection[str], form: str) -> PreTrainedModel:
    """Has torchao quantise some linear layers of a model, in place, if that computes where the model lies.

    Args:
        model (`PreTrainedModel`): dense.
        names (`Collection[str]`): of the layers.
        form (`str`): of `FORMS`: weight-only, `"torchao int8"` with a scale for each row, or `"torchao int4"` by groups.

    Returns:
        The same model. Its modules call torchao as they are, without `torch.compile`.

    Raises:
        [`NotQuantized`]: it cannot. The model's weights are as they were.
    """
    modules = dict(model.named_modules())
    layers: dict[str, Any] = {name: modules.get(name) for name in names}
    for name, layer in layers.items():
        if not isinstance(layer, nn.Linear):  # experts, gpt2's Conv1D
            raise NotQuantized(f"{name} is no nn.Linear")
    first = next(iter(layers.values()))
    config = _working(form, {layer.in_features for layer in layers.values()}, first.weight.device, first.weight.dtype)
    _torchao("quantization").quantize_(model, config, filter_fn=lambda _, name: name in layers)
    return model


def footprint(model: nn.Module) -> int:
    """Bytes of a model's parameters and buffers, those of tensors that wrap others counted inside."""
    return sum(_nbytes(tensor) for tensors in (model.parameters(), model.buffers()) for tensor in tensors)


def _nbytes(tensor: torch.Tensor) -> int:
    if not hasattr(tensor, "__tensor_flatten__"):
        return tensor.nbytes
    names, _ = tensor.__tensor_flatten__()
    return sum(_nbytes(getattr(tensor, name)) for name in names)


def _torchao(module: str) -> Any:
    return importlib.import_module(f"torchao.{module}")


def _working(form: str, columns: Collection[int], device: torch.device, dtype: torch.dtype) -> Any:
    """The first config of a form that quantises and computes layers with so many columns."""
    reasons = []
    for make in FORMS[form](columns):
        try:
            config = make()
            for count in sorted(columns):
                _try(config, torch.linspace(-1, 1, ROWS * count, device=device, dtype=dtype).view(ROWS, count))
            return config
        except Exception as error:  # torchao raises of every kind: AssertionError, ImportError, NotImplementedError
            reasons.append(" ".join(f"{error}".split("\n", 1)[0].split()) or type(error).__name__)
    raise NotQuantized(reasons[0])


@torch.no_grad()
def _try(config: Any, weight: torch.Tensor) -> None:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight)
    _torchao("quantization").quantize_(layer, config)
    if type(layer.weight) is nn.Parameter:
        raise ValueError(f"weights with {weight.shape[1]} columns are left as they are")
    layer(weight[:1])
