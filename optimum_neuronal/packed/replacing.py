"""Replace dense modules with packed ones, in a model in memory or in one on meta that is about to be loaded."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import Conv1D, PreTrainedModel

from ..compat.buffer_module import inherit_hooks
from .packed_experts import is_packable, put_stack, stack_names, take_stack
from .packed_linear import PackedLinear, is_linear
from .packed_module import PackedModule
from .packed_weight import FORMAT, PackedWeight, check_shape, swapped


@dataclass(frozen=True)
class PackedHeader:
    """One weight of a packed checkpoint, of which only the headers have been read.

    Raises:
        `ValueError`: the file names another format, such as low-bit weights.
    """

    format: str
    shape: Sequence[int]  # of the dense parameter
    dtype: torch.dtype
    # "packed_mask", ...: mapped, so elements are read from the file when they are used
    tensors: Mapping[str, torch.Tensor]
    transposed: bool = False  # the dense parameter has its last two dimensions swapped

    def __post_init__(self):
        if self.format != FORMAT:
            raise ValueError(
                f"The checkpoint has a weight in the format {self.format!r}: expected {FORMAT!r}. Read it with the "
                "version of optimum_neuronal that wrote it, or prune the dense model again."
            )

    def matrix(self, device: str | None = None) -> PackedWeight:
        """Return the weight as a matrix. Raise `ValueError` if it is damaged, as far as the device tells."""
        check_shape(self.shape, self.dtype)
        *lead, columns = swapped(self.shape, self.transposed)
        tensors = {name: part.to(device) for name, part in self.tensors.items()}
        return PackedWeight.from_stored(tensors, (math.prod(lead), columns), self.dtype)


def put_empty(model: PreTrainedModel, headers: Mapping[str, PackedHeader], dtype: torch.dtype | None = None) -> None:
    """Replace modules, or parameters of experts modules, of a model on meta with empty packed ones, by their paths.

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


def put_packed(model: nn.Module, path: str, matrix: PackedWeight) -> None:
    """Replace a linear layer, or a parameter of an experts module, with a packed one in place."""
    parent, name, module = _find(model, path)
    if isinstance(module, nn.Parameter):
        put_stack(parent, name, matrix)
    else:
        packed = PackedLinear(matrix, module.bias, type(module))
        packed.trainable = module.weight.requires_grad
        replace_module(model, module, inherit_hooks(packed, module))


def take_packed(model: nn.Module, path: str) -> None:
    """Replace a packed module with the dense one, bit-equal."""
    parent, name, module = _find(model, path)
    if isinstance(module, PackedLinear):
        replace_module(model, module, module.to_dense_module())
    else:
        take_stack(parent, name)


def packable_paths(module: nn.Module, name: str) -> list[str]:
    """Return the paths of a module's weights that can be packed. `name` is the module's path."""
    if is_linear(type(module)):
        return [name]
    return [f"{name}.{weight}" for weight in stack_names(module)] if is_packable(module) else []


def packable_parameter(model: nn.Module, path: str) -> torch.Tensor:
    """Return the dense parameter at a path. Raise `AttributeError` if there is none, `ValueError` if it has no packed form."""
    parent, _, module = _find(model, path)
    has_packed = any(isinstance(child, PackedModule) for child in parent.children())
    if isinstance(module, nn.Parameter) and (has_packed or is_packable(parent)):
        return module
    if isinstance(module, nn.Module) and is_linear(type(module)):
        return module.weight
    raise ValueError(f"a {type(module).__name__} has no packed form")


def keeps_transposed(model: nn.Module, path: str) -> bool:
    """Return True if the parameter at a path has the layout (in, out)."""
    parent, _, module = _find(model, path)
    return isinstance(module, Conv1D) or isinstance(module, nn.Parameter) and getattr(parent, "is_transposed", False)


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
