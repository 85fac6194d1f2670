"""The base of modules with packed weights: buffers, conversion, what a state dict may hold, and refusals.

Kernels believe what offsets and masks say. So parts that came in any other way than from a packed weight, or from a state
dict that was checked, are checked before they are computed with.
"""

import operator
import os
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import nn

from ..model.packed_modules import PackedModule
from .formats.packed_matrix import DTYPES, PackedMatrix
from .inference_only import ADVICE, Adapters, is_transformed
from .ops import linear, product
from .packed_tensor import PackedTensor


class PackedBuffers(PackedModule):
    """Holds a matrix in buffers, so that no optimizer sees them, and that `.to` moves all and converts the values.

    Args:
        matrix ([`PackedMatrix`]): to hold.
        transposed (`bool`): True if the dense parameter is kept as (in, out).

    Attributes:
        kind (`type`), format (`str`): class and format of the matrix.
        row_count, columns (`int`): of the matrix: rows of all experts.
        dtype_from (`str`): the buffer whose dtype and device are the weight's, since `.to` converts it: the values, or one
            without elements.
        adapters ([`Adapters`]): around packed weights of the model; while there are any, gradients pass through this one.
    """

    def __init__(self, matrix: PackedMatrix, transposed: bool):
        super().__init__()
        self.kind, self.format = type(matrix), matrix.name
        self.row_count, self.columns, self.transposed = matrix.row_count, matrix.shape[-1], transposed
        tensors = {name: tensor.detach() for name, tensor in matrix.tensors().items()}
        for name in matrix.fixed.keys() & tensors.keys():
            tensors[name] = tensors[name].contiguous().view(torch.uint8)  # which nothing converts
        converted = [name for name, tensor in tensors.items() if tensor.is_floating_point()]
        if not converted:
            tensors["like"] = torch.empty(0, dtype=matrix.dtype, device=matrix.device)
        self.dtype_from = converted[0] if converted else "like"
        self.owned = tuple(tensors)
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)
        self.checked, self._seen = True, None
        self.adapters = Adapters()

    @property
    def matrix(self) -> PackedMatrix:
        """The matrix, which shares the buffers. Raise `RuntimeError` if parts were set since and do not agree."""
        parts = [self._buffers[name] for name in self.owned]
        if self._seen is not None and all(map(operator.is_, parts, self._seen[0])):
            return self._seen[1]
        if any(part is None for part in parts):
            raise RuntimeError(
                f"A packed weight has lost its buffers: load the model again, or {ADVICE} before you remove them."
            )
        matrix = self._matrix_of(dict(zip(self.owned, parts)))
        if not self.checked and not self.held.is_meta:
            try:
                matrix.check()
            except ValueError as error:
                raise RuntimeError(
                    f"A packed weight is damaged: {error}. Its buffers were set or emptied: load_state_dict() with those "
                    "of a packed model, or load the model again."
                ) from error
            self.checked = True
        self.__dict__["_seen"] = parts, matrix
        return matrix

    def _matrix_of(self, parts: Mapping[str, torch.Tensor]) -> PackedMatrix:
        """Return the matrix of parts by their buffers' names. Raise `ValueError` if some cannot be read."""
        kind, tensors = self.kind, {name: part for name, part in parts.items() if name != "like"}
        for name in kind.fixed.keys() & tensors.keys():
            part = tensors[name]
            size = kind.fixed[name].itemsize
            if part.dtype != torch.uint8 or not part.ndim or part.shape[-1] % size:
                raise ValueError(
                    f"its {name} are {part.dtype} of shape {list(part.shape)}: expected torch.uint8, {size} for each number"
                )
            tensors[name] = part.contiguous().view(kind.fixed[name])
        return kind.of_tensors(tensors, (self.row_count, self.columns), parts[self.dtype_from].dtype)

    def _forget(self) -> None:
        self.__dict__["_seen"] = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_seen": None}

    def __setattr__(self, name: str, value) -> None:
        if name in self.__dict__.get("owned", ()):
            self.checked = False
            self._forget()
        super().__setattr__(name, value)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return `x @ W.T + bias`, x converted to the weight's dtype; in a graph of torch.compile by the operation that it knows."""
        if torch.compiler.is_compiling():
            tensors, x = self._graph_tensors(), x.to(self.held.dtype)
            return torch.ops.optimum_neuronal.packed_linear(x, self.format, tensors, self.row_count, bias)
        matrix = self.matrix
        compute = product if self.adapters or is_transformed() else linear
        return compute(matrix, x if x.dtype == matrix.dtype else x.to(matrix.dtype), bias)

    def _graph_tensors(self) -> list[torch.Tensor]:
        fixed = self.kind.fixed
        named = [(name, getattr(self, name)) for name in self.owned if name != "like"]
        return [part.view(fixed[name]) if name in fixed else part for name, part in named]

    @property
    def held(self) -> torch.Tensor:
        """The buffer whose dtype and device are the weight's."""
        return getattr(self, self.dtype_from)

    @property
    @abstractmethod
    def dense_shape(self) -> tuple[int, ...]:
        """Shape of the dense parameter."""

    @property
    def dense_bytes(self) -> int:
        return self.row_count * self.columns * self.held.element_size()

    @property
    def packed_bytes(self) -> int:
        return sum(getattr(self, name).nbytes for name in self.owned)

    @property
    def sparsity(self) -> float:
        """Share of the elements that are not kept, in [0, 1]."""
        return 1 - self.matrix.kept / max(1, self.row_count * self.columns)

    def stand_in(self) -> PackedTensor:
        return PackedTensor(self.matrix, self.dense_shape, self.transposed)

    def dense(self) -> torch.Tensor:
        """Return the dense parameter, bit-equal, in its own layout."""
        return self.stand_in().unpack()

    def check_conversion(self, function) -> None:
        """Raise `TypeError` if a function that modules apply to their tensors converts to a dtype without kernels."""
        dtype = function(self.held[:0]).dtype
        if dtype not in DTYPES:
            raise TypeError(f"Packed weights cannot be {dtype}: expected one of {', '.join(map(str, DTYPES))}.")

    def _apply(self, function, recurse: bool = True):
        self.check_conversion(function)
        checked = self.checked and _keeps_content(function, self.held.device)
        super()._apply(function, recurse)
        self._forget()
        self.checked = checked
        return self

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, errors):
        """Take packed weights with any number of values or bits. Refuse damaged ones before any buffer is set."""
        given = {name: state_dict[f"{prefix}{name}"] for name in self.owned if f"{prefix}{name}" in state_dict}
        if f"{prefix}weight" in state_dict:
            errors.append(f"{prefix}weight is dense, but the model's is packed: {ADVICE}.")
            return
        if given:
            try:
                self._check_parts(given, converted=not local_metadata.get("assign_to_params_buffers", False))
            except ValueError as error:
                errors.append(f"{prefix}{self.owned[0]} is damaged: {error}.")
                return
        for name in given:
            own = getattr(self, name)
            if given[name].shape != own.shape:
                setattr(self, name, own.new_empty(given[name].shape))
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, errors
        )
        if given:
            self._forget()
            self.checked = not self.held.is_meta

    def _check_parts(self, parts: dict[str, torch.Tensor], converted: bool) -> None:
        """Raise `ValueError` unless parts, by their buffers' names, make a packed weight of this shape.

        `converted`: they will take this weight's dtype.
        """
        missing = [name for name in self.owned if name not in parts]
        if missing:
            raise ValueError(
                f"it comes without {', '.join(missing)}, and parts of a packed weight are loaded together"
            )
        if any(part.is_meta for part in parts.values()):
            return
        for name, part in parts.items():
            if name != self.dtype_from and part.dtype != getattr(self, name).dtype:
                raise ValueError(f"its {name} have dtype {part.dtype}: expected {getattr(self, name).dtype}")
        held = parts[self.dtype_from]
        if held.dtype not in DTYPES and not (converted and held.is_floating_point()):
            raise ValueError(f"its {self.dtype_from} have dtype {held.dtype}: expected {', '.join(map(str, DTYPES))}")
        if "like" in parts and parts["like"].shape != (0,):
            raise ValueError(f"its like has shape {list(parts['like'].shape)}: expected [0]")
        taken = {**parts, self.dtype_from: held.to(self.held.dtype)} if converted else parts
        self._matrix_of(taken).check()

    def extra_repr(self) -> str:
        return (
            f"{self.matrix.describe()}, dtype={self.held.dtype}, bytes={self.packed_bytes:,} of {self.dense_bytes:,}"
        )


class WeightFacts:
    """Shape, dtype and device of a weight that is packed. It is no tensor.

    Models ask their projections' weights for these, to convert or to move what they compute; whoever wants the elements
    is told to densify.
    """

    def __init__(self, shape: tuple[int, ...], values: torch.Tensor):
        self.shape, self.dtype, self.device = torch.Size(shape), values.dtype, values.device

    ndim = property(lambda self: len(self.shape))
    is_cuda = property(lambda self: self.device.type == "cuda")
    is_meta = property(lambda self: self.device.type == "meta")
    requires_grad = False

    def __len__(self) -> int:
        return self.shape[0]

    def dim(self) -> int:
        return self.ndim

    def numel(self) -> int:
        return self.shape.numel()

    def size(self, dim: int | None = None):
        return self.shape if dim is None else self.shape[dim]

    def element_size(self) -> int:
        return self.dtype.itemsize

    def is_floating_point(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"packed weight(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"A packed weight has no {name!r}: {ADVICE}, or take dense() of its module.")

    def __getitem__(self, index) -> NoReturn:
        raise TypeError(f"A packed weight cannot be indexed: {ADVICE}, or take dense() of its module.")

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None) -> NoReturn:
        name = getattr(function, "__name__", function)
        raise TypeError(f"{name} cannot take a packed weight: {ADVICE}, or take dense() of its module.")


HOOKS = [name for name in vars(nn.Module()) if "hook" in name]


def take_place(new: nn.Module, old: nn.Module) -> nn.Module:
    """Gives a module the mode and the hooks of the one whose place it takes, handles of hooks included; returns it."""
    new.train(old.training)
    for name in HOOKS:
        setattr(new, name, getattr(old, name))
    return new


def _keeps_content(function, device: torch.device) -> bool:
    """Return True unless a function that modules apply to their tensors leaves them empty, as `to_empty` does."""
    if device.type == "meta":
        return False
    probe = torch.frombuffer(bytearray(os.urandom(16)), dtype=torch.uint8).to(device)
    result = function(probe)
    return not result.is_meta and result.dtype == probe.dtype and torch.equal(result.to(device), probe)
