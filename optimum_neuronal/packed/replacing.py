"""Put packed modules in the place of dense ones: of a model in memory, or of a model on meta that is about to be loaded."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import Conv1D, PreTrainedModel

from ..compat import hf_private
from .formats.packed_matrix import FORMATS, PackedMatrix, check_shape, swapped
from .packed_embedding import PackedEmbedding, TiedLinear, is_embedding, is_head
from .packed_experts import is_packable, put_stack, stack_names, take_stack
from .packed_linear import PackedLinear, is_linear, make_linear
from .packed_module import PackedModule, take_place


@dataclass(frozen=True)
class PackedHeader:
    """One weight of a packed checkpoint, of which only the headers have been read."""

    format: str
    shape: Sequence[int]  # of the dense parameter
    dtype: torch.dtype
    # "packed_mask", ...: mapped, so elements are read from the file when they are used
    tensors: Mapping[str, torch.Tensor]
    transposed: bool = False  # the dense parameter has its last two dimensions swapped

    def matrix(self, device: str | None = None) -> PackedMatrix:
        """Return the matrix, whose values are not checked yet. Raise `ValueError` if the tensors don't fit."""
        check_shape(self.shape, self.dtype)
        *lead, columns = swapped(self.shape, self.transposed)
        shape, tensors = (math.prod(lead), columns), {name: part.to(device) for name, part in self.tensors.items()}
        return FORMATS.get(self.format).of_stored(tensors, shape, self.dtype)


def put_empty(model: PreTrainedModel, headers: Mapping[str, PackedHeader], dtype: torch.dtype | None = None) -> None:
    """Replace modules, or parameters of experts modules, of a model on the meta device by empty packed ones, by their paths.

    Raise `ValueError` for headers that are damaged or don't fit the model.
    """
    for path, header in headers.items():
        try:
            parameter = packable_parameter(model, path)
            if tuple(parameter.shape) != tuple(header.shape):
                raise ValueError(f"its shape is {list(header.shape)}: expected {list(parameter.shape)} for the model")
            if header.transposed != keeps_transposed(model, path):
                raise ValueError(f"'transposed' is {header.transposed}: expected {not header.transposed}")
            matrix = header.matrix("meta").to(dtype=dtype)
        except (AttributeError, ValueError) as error:
            raise ValueError(f"The packed weight of {path} cannot be loaded: {error}.") from error
        put_packed(model, path, matrix)


def put_packed(model: PreTrainedModel, path: str, matrix: PackedMatrix) -> None:
    """Replace a module, or a parameter of an experts module, and heads tied to it, by packed ones in place."""
    parent, name, module = _find(model, path)
    trainable = (module if isinstance(module, nn.Parameter) else module.weight).requires_grad
    if isinstance(module, nn.Parameter):
        put_stack(parent, name, matrix)
    elif isinstance(module, nn.Embedding):
        heads, table = _tied_heads(model, module), PackedEmbedding(matrix, module)
        for other in heads:
            replace_module(model, other, TiedLinear(table, other))
        replace_module(model, module, table)
        _tie_again(model)
    else:
        packed = PackedLinear(matrix, module.bias, type(module))
        replace_module(model, module, take_place(packed, module))
    model.get_submodule(path).trainable = trainable


def take_packed(model: PreTrainedModel, path: str) -> None:
    """Replace a packed module, and heads that are tied to it, by the dense ones, the same bit for bit."""
    parent, name, module = _find(model, path)
    if isinstance(module, (PackedLinear, PackedEmbedding)):
        dense = module.to_dense_module()
        for other in [m for m in model.modules() if isinstance(m, TiedLinear) and m.embedding is module]:
            replace_module(model, other, make_linear(other, dense.weight))
        replace_module(model, module, dense)
        if isinstance(module, PackedEmbedding):
            _tie_again(model)
    else:
        take_stack(parent, name)


def packable_paths(module: nn.Module, name: str) -> list[str]:
    """Return the paths of the weights of a module that can be packed, except embeddings; `name` is the module's."""
    if is_linear(type(module)):
        return [name]
    return [f"{name}.{weight}" for weight in stack_names(module)] if is_packable(module) else []


def packable_parameter(model: nn.Module, path: str) -> torch.Tensor:
    """Return the dense parameter at a path. Raise `AttributeError` if there is none, `ValueError` if it has no packed form."""
    parent, _, module = _find(model, path)
    has_packed = any(isinstance(child, PackedModule) for child in parent.children())
    if isinstance(module, nn.Parameter) and (has_packed or is_packable(parent)):
        return module
    if isinstance(module, nn.Module) and (is_linear(type(module)) or is_embedding(module)):
        return module.weight
    raise ValueError(f"a {type(module).__name__} has no packed form")


def keeps_transposed(model: nn.Module, path: str) -> bool:
    """Return True if the parameter at a path has the layout (in, out)."""
    parent, _, module = _find(model, path)
    return isinstance(module, Conv1D) or isinstance(module, nn.Parameter) and getattr(parent, "is_transposed", False)


def has_own_forward(module: nn.Module) -> bool:
    """Return True if this module's forward was replaced, as accelerate does to move inputs between devices."""
    return "forward" in vars(module)


def replace_module(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put a module in the place of another wherever the model holds that one."""
    for parent in model.modules():
        for key, child in parent._modules.items():
            if child is old:
                parent._modules[key] = new


def _find(model: nn.Module, path: str) -> tuple[nn.Module, str, nn.Module | nn.Parameter]:
    """Return the parent of what is at a path, its name there, and itself."""
    prefix, _, name = path.rpartition(".")
    parent = model.get_submodule(prefix)
    return parent, name, getattr(parent, name)


def _tied_heads(model: PreTrainedModel, embedding: nn.Embedding) -> list[nn.Module]:
    """Return the heads that share the weight of embeddings, or will share it when the model is loaded."""
    names = {id(module): name for name, module in model.named_modules()}
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    source = f"{names[id(embedding)]}.weight"
    return [
        module
        for name, module in model.named_modules()
        if is_head(module) and (module.weight is embedding.weight or tied.get(f"{name}.weight") == source)
    ]


def _tie_again(model: PreTrainedModel) -> None:
    """Keep the model's list of tied weights to those that it holds as parameters."""
    tied = [m for m in model.modules() if isinstance(m, TiedLinear)]
    gone = {*tied, *(head.embedding for head in tied)}
    hf_private.leave_untied(model, {f"{name}.weight" for name, module in model.named_modules() if module in gone})
