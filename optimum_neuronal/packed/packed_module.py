"""The base of modules with packed weights, whose buffers are named as the tensors in a packed file."""

import operator
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .formats.packed_matrix import STORED, PackedMatrix, swapped
from .ops import linear, unpack


class PackedModule(nn.Module):
    """A module that holds a packed matrix in its buffers `packed_mask`, `packed_values`, ...

    The matrix, (rows, columns), is on the meta device if it is yet to be loaded. `transposed`: the dense parameter has its
    last two dimensions swapped.
    """

    suffix = ".weight"  # follows the module's name in the name of the dense parameter

    def __init__(self, matrix: PackedMatrix, transposed: bool = False):
        super().__init__()
        self.kind, self.format, self.transposed = type(matrix), matrix.name, transposed
        self.row_count, self.columns = matrix.row_count, matrix.shape[-1]
        self.passes_gradients = False  # to the input, for adapters
        self.trainable = True  # the dense parameter, `requires_grad`
        stored = matrix.stored()
        self.stored_names = tuple(stored)
        for name, tensor in stored.items():
            self.register_buffer(name, tensor.detach())
        for name in matrix.derived:
            self.register_buffer(STORED + name, getattr(matrix, name), persistent=False)
        self.register_buffer("like", torch.empty(0, dtype=matrix.dtype, device=matrix.device), persistent=False)
        self._watched = (*stored, "like")
        self._checked: tuple[list[torch.Tensor], PackedMatrix] | None = None
        if not self.like.is_meta:
            self.check()

    @property
    def matrix(self) -> PackedMatrix:
        """The matrix, which shares the buffers. They are checked first if they were replaced."""
        seen = self._checked
        if seen is None or not all(map(operator.is_, map(self._buffers.get, self._watched), seen[0])):
            return self.check()
        return seen[1]

    @torch.compiler.disable
    def check(self) -> PackedMatrix:
        """Check everything that kernels rely on, and return the matrix. Raise `ValueError` for damaged buffers."""
        tensors = {name: self._buffers[name] for name in self.stored_names}
        try:
            matrix = self.kind.of_stored(tensors, (self.row_count, self.columns), self.dtype)
            if not self.like.is_meta:
                matrix.check()
        except ValueError as error:
            raise ValueError(f"A packed weight cannot be used: {error}. Load the model again.") from error
        for name in matrix.derived:
            self._buffers[STORED + name] = getattr(matrix, name)
        self.__dict__["_checked"] = [self._buffers[name] for name in self._watched], matrix
        return matrix

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("stored_names", ()):
            self.__dict__["_checked"] = None
        super().__setattr__(name, value)

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing, unexpected, errors):
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)
        if any(prefix + name in state_dict for name in self.stored_names):
            try:
                self.check()
            except ValueError as error:
                self.__dict__["_checked"] = None
                errors.append(f"{prefix.removesuffix('.')}: {error}")

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return `x @ W.T + bias` in the weight's dtype, to which x is converted."""
        if torch.compiler.is_compiling():
            x = self.watched(x.to(self.dtype))
            return torch.ops.optimum_neuronal.packed_linear(x, self.format, self.tensors(), self.row_count, bias)
        matrix = self.matrix
        return linear(matrix, self.watched(x if x.dtype == matrix.dtype else x.to(matrix.dtype)), bias)

    def watched(self, x: torch.Tensor) -> torch.Tensor:
        """Return an input of which a backward raises an error, unless adapters are trained."""
        if x.requires_grad and torch.is_grad_enabled() and not self.passes_gradients:
            return torch.ops.optimum_neuronal.block_gradient(x)
        return x

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors of the matrix in the order of its format, for a graph of torch.compile."""
        if self._checked is None:
            self.check()
        kind, found = self.kind, []
        for name in kind.names:
            if (tensor := self._buffers.get(STORED + name)) is not None:
                found.append(tensor.view(kind.fixed[name]) if name in kind.fixed else tensor)
        return found

    @property
    @abstractmethod
    def dense_shape(self) -> tuple[int, ...]:
        """Shape of the dense parameter."""

    @property
    def dtype(self) -> torch.dtype:
        return self.like.dtype

    @property
    def device(self) -> torch.device:
        return self.like.device

    @property
    def weight(self) -> "WeightInfo":
        """Shape, dtype and device of the dense weight, which models read."""
        return WeightInfo(torch.Size(self.dense_shape), self.dtype, self.device)

    @property
    def dense_bytes(self) -> int:
        """Bytes of the dense parameter."""
        return self.row_count * self.columns * self.dtype.itemsize

    @property
    def packed_bytes(self) -> int:
        """Bytes of the packed parameter in memory."""
        return sum(buffer.nbytes for name, buffer in self._buffers.items() if name.startswith(STORED))

    def dense(self) -> torch.Tensor:
        """Return the dense parameter, bit-equal, in its own layout."""
        dense = unpack(self.matrix).view(swapped(self.dense_shape, self.transposed))
        return dense.mT.clone(memory_format=torch.contiguous_format) if self.transposed else dense

    def dense_parameter(self) -> nn.Parameter:
        """Return the dense parameter as it was before it was packed."""
        return nn.Parameter(self.dense(), requires_grad=self.trainable)

    def extra_repr(self) -> str:
        return f"format={self.format}, dtype={self.dtype}, bytes={self.packed_bytes:,} of {self.dense_bytes:,}"


@dataclass(frozen=True)
class WeightInfo:
    """What models read of a weight. It holds no elements."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    requires_grad = False
    _is_hf_initialized = True  # transformers does not initialize it

    def size(self) -> torch.Size:  # `resize_token_embeddings` calls it
        return self.shape


def describe_weight(format: str, shape: Sequence[int], dtype: torch.dtype, transposed: bool) -> dict[str, Any]:
    """Return what a file says of a packed weight: format, dense shape, dtype, and `transposed` if it is."""
    facts = {"format": format, "shape": list(shape), "dtype": str(dtype).removeprefix("torch.")}
    return {**facts, "transposed": True} if transposed else facts


def packed_modules(model: nn.Module) -> Iterator[tuple[str, PackedModule]]:
    """Yield all packed modules of a model with their names."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, PackedModule))


def dense_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state dict of the dense model. Packed weights are unpacked, one after the other."""
    state = model.state_dict()
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, PackedModule):
            for buffer in module.stored_names:
                del state[f"{name}.{buffer}"]
            state[name + module.suffix] = module.dense()
    return state


def allow_gradients(model: nn.Module) -> None:
    """Let gradients flow through packed weights to their inputs, so that adapters can be trained."""
    for _, module in packed_modules(model):
        module.passes_gradients = True


HOOKS = [name for name in vars(nn.Module()) if "hook" in name]


def take_place(new: nn.Module, old: nn.Module) -> nn.Module:
    """Give a module the mode and the hooks of the module that it replaces, and return it."""
    new.train(old.training)
    for name in HOOKS:
        setattr(new, name, getattr(old, name))
    return new
