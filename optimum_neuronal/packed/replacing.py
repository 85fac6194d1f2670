"""Replace dense modules with packed ones, in a model in memory or in one on meta that is about to be loaded."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import Conv1D, PreTrainedModel

from ..compat import hf_private
from ..compat.buffer_module import inherit_hooks
from .packed_experts import FUNCTION, PackedStack, is_packable, stack_names
from .packed_module import PackedLinear, is_linear
from .packed_weight import PackedWeight, check_shape, swapped


@dataclass(frozen=True)
class PackedHeader:
    """One weight of a packed checkpoint, of which only the headers have been read."""

    shape: Sequence[int]  # of the dense parameter
    dtype: torch.dtype
    # "packed_mask", ...: mapped, so elements are read from the file when they are used
    tensors: Mapping[str, torch.Tensor]
    transposed: bool = False  # the dense parameter has its last two dimensions swapped

    def matrix(self, device: str | None = None) -> PackedWeight:
        """Return the weight as a matrix. Raise `ValueError` if it is damaged, as far as the device tells."""
        check_shape(self.shape, self.dtype)
        *lead, columns = swapped(self.shape, self.transposed)
        tensors = {name: part.to(device) for name, part in self.tensors.items()}
        return PackedWeight.from_stored(tensors, (math.prod(lead), columns), self.dtype)


@dataclass(frozen=True)
class Packable:
    """A weight of a model that can be packed: of a linear layer, or of all experts of a layer.

    Attributes:
        path (`str`): its name in packed files: of the layer, or of the experts' parameter.
        key (`str`): the name of the dense parameter.
        transposed (`bool`): the dense parameter has its last two dimensions swapped.
    """

    path: str
    key: str
    transposed: bool

    def parameter(self, model: nn.Module) -> torch.Tensor:
        module, _, name = self.key.rpartition(".")
        return getattr(model.get_submodule(module), name)


def find_packable(module: nn.Module, name: str) -> list[Packable]:
    """Return the weights of a module, of this path, that can be packed: both of experts, which are packed together."""
    if is_linear(type(module)):
        return [Packable(name, f"{name}.weight", isinstance(module, Conv1D))]
    if not is_packable(module):
        return []
    return [Packable(f"{name}.{key}", f"{name}.{key}", module.is_transposed) for key in stack_names(module)]


def put_empty(model: PreTrainedModel, headers: Mapping[str, PackedHeader], dtype: torch.dtype | None = None) -> None:
    """Replace modules, or both parameters of experts modules, of a model on meta with empty packed ones, by their paths.

    Raise `ValueError` for headers that are damaged or don't fit the model.
    """
    left = dict(headers)
    for name, module in list(model.named_modules()):
        places = find_packable(module, name)
        if left.keys().isdisjoint(place.path for place in places):
            continue
        for place in places:
            try:
                if (header := left.pop(place.path, None)) is None:
                    raise ValueError("the checkpoint has it dense, but packs another weight of the layer")
                put_packed(model, place.path, _empty(header, place, place.parameter(model).shape).to(dtype))
            except ValueError as error:
                raise ValueError(f"The packed weight of {place.path} cannot be loaded: {error}.") from error
    if left:
        raise ValueError(f"The packed weight of {min(left)} cannot be loaded: the model has no such weight to pack.")


def _empty(header: PackedHeader, place: Packable, shape: torch.Size) -> PackedWeight:
    if shape != tuple(header.shape):
        raise ValueError(f"its shape is {list(header.shape)}: expected {list(shape)} for the model")
    if header.transposed != place.transposed:
        raise ValueError(f"'transposed' is {header.transposed}: expected {place.transposed}")
    return header.matrix("meta")


def put_packed(model: nn.Module, path: str, matrix: PackedWeight) -> None:
    """Replace a linear layer, or a parameter of an experts module, with a packed one in place."""
    parent, name, module = _find(model, path)
    if not isinstance(module, nn.Parameter):
        packed = PackedLinear(matrix, module.bias, type(module))
        packed.trainable = module.weight.requires_grad
        replace_module(model, module, inherit_hooks(packed, module))
        return
    before = hf_private.choose_experts_function(parent, FUNCTION)
    stack = PackedStack(matrix, len(module), parent.is_transposed, before)
    stack.trainable = module.requires_grad
    delattr(parent, name)
    setattr(parent, name, stack.train(parent.training))


def take_packed(model: nn.Module, path: str) -> None:
    """Replace a packed module with the dense one, bit-equal, and restore what computed experts before."""
    parent, name, module = _find(model, path)
    if isinstance(module, PackedLinear):
        replace_module(model, module, module.to_dense_module())
        return
    setattr(parent, name, module.dense_parameter())
    if module.dense_config is not None:
        parent.config = module.dense_config


def replace_module(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Replace a module with another one wherever the model holds it."""
    names = [name for name, module in model.named_modules(remove_duplicate=False) if module is old]
    for name in names:
        model.set_submodule(name, new)


def _find(model: nn.Module, path: str) -> tuple[nn.Module, str, nn.Module | nn.Parameter]:
    """Return the parent of a module or parameter, its name in the parent, and itself."""
    prefix, _, name = path.rpartition(".")
    parent = model.get_submodule(prefix)
    return parent, name, getattr(parent, name)
