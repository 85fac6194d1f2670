"""What modules with packed weights have in common: buffers, conversion, what a state dict may hold, and refusals.

Kernels believe what offsets and masks say. So parts that came in any other way than from a packed weight, or from a state
dict that was checked, are checked before they are computed with.
"""

import os
from abc import abstractmethod
from typing import NoReturn

import torch
from torch import nn

from ..model.packed_modules import PackedModule
from .inference_only import ADVICE
from .layouts import Rows, rows_of
from .packed_rows import DTYPES
from .packed_tensor import PackedTensor


class PackedBuffers(PackedModule):
    """Holds rows in buffers, so that no optimizer sees them, and that `.to` moves all and converts the values.

    Args:
        rows ([`PackedRows`], [`CodedRows`] or [`Int8Rows`]): to hold.
        transposed (`bool`): whether the dense parameter is kept as (in, out).

    Attributes:
        kind (`str`): of the rows' layout.
        rounded (`torch.dtype`, *optional*): see the rows.
    """

    def __init__(self, rows: Rows, transposed: bool):
        super().__init__()
        self.columns, self.transposed = rows.shape[1], transposed
        self.kind, self.owned, self.rounded = rows.kind, rows.names, getattr(rows, "rounded", None)
        for name in rows.names:
            self.register_buffer(name, _as_bytes(getattr(rows, name).detach()))
        self.checked = True

    @property
    def rows(self) -> Rows:
        """Return the rows, which share the buffers. Raise `RuntimeError` if parts were set since and do not agree."""
        parts = [_of_bytes(getattr(self, name)) for name in self.owned]
        rows = rows_of(self.kind, parts, self.columns, self.rounded)
        if not self.checked and not self.held.is_meta:
            try:
                rows.check()
            except ValueError as error:
                raise RuntimeError(
                    f"A packed weight is damaged: {error}. Its buffers were set or emptied: load_state_dict() with those "
                    "of a packed model, or load the model again."
                ) from error
            self.checked = True
        return rows

    def __setattr__(self, name: str, value) -> None:
        if name in self.__dict__.get("owned", ()):
            self.checked = False
        super().__setattr__(name, value)

    @property
    def held(self) -> torch.Tensor:
        """The buffer whose dtype and device are the weight's: those that `.to` converts."""
        return getattr(self, "values" if "values" in self.owned else "like")

    @property
    def row_count(self) -> int:
        """Rows of the parameter: output features, of all experts."""
        return getattr(self, self.owned[0]).shape[0]

    @property
    @abstractmethod
    def dense_shape(self) -> tuple[int, ...]:
        """Shape of the dense parameter."""

    @property
    def dense_bytes(self) -> int:
        return self.row_count * self.columns * self.held.element_size()

    @property
    def packed_bytes(self) -> int:
        return self.rows.nbytes

    @property
    def sparsity(self) -> float:
        """Share of the elements that are not kept, in [0, 1]."""
        return 1 - self.rows.kept / max(1, self.row_count * self.columns)

    def stand_in(self) -> PackedTensor:
        return PackedTensor(self.rows, self.dense_shape, self.transposed)

    def dense(self) -> torch.Tensor:
        """The dense parameter, bit-equal, in its own layout."""
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
        self.checked = checked
        return self

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, errors):
        """Take packed weights with any number of values or codes. Refuse damaged ones before any buffer is set."""
        given = {name: state_dict[f"{prefix}{name}"] for name in self.owned if f"{prefix}{name}" in state_dict}
        if f"{prefix}weight" in state_dict:
            errors.append(f"{prefix}weight is dense, but the model's is packed: {ADVICE}.")
            return
        if given:
            try:
                self._check_parts(given, converted=not local_metadata.get("assign_to_params_buffers", False))
            except ValueError as error:
                errors.append(f"{prefix}{self.owned[1]} is damaged: {error}.")
                return
        for name in given.keys() & {"values", "codes", "scales"}:
            if given[name].shape != getattr(self, name).shape:
                setattr(self, name, getattr(self, name).new_empty(given[name].shape))
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, errors
        )
        if given:
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
        tensors = [parts[name] for name in self.owned]
        if any(tensor.is_meta for tensor in tensors):
            return
        for name, tensor in parts.items():
            own = getattr(self, name)
            other_form = tensor.ndim != own.ndim and name != "scales"  # of which there are short and other ones
            if other_form or (name == self.owned[0] and len(tensor) != len(own)):
                raise ValueError(f"its {name} have shape {list(tensor.shape)}: expected {list(own.shape)}")
        held = next(name for name in self.owned if getattr(self, name) is self.held)
        if parts[held].dtype not in DTYPES and not (converted and parts[held].is_floating_point()):
            raise ValueError(f"its {held} have dtype {parts[held].dtype}: expected {', '.join(map(str, DTYPES))}")
        tensors[self.owned.index(held)] = parts[held].to(self.held.dtype) if converted else parts[held]
        rows_of(self.kind, [_of_bytes(tensor) for tensor in tensors], self.columns).check()

    def extra_repr(self) -> str:
        rows = self.rows
        coded = "" if self.kind == "packed" else f"value_bits={rows.value_bits}, activations={rows.activations}, "
        return f"sparsity={self.sparsity:.4f}, {coded}dtype={self.held.dtype}, bytes={self.packed_bytes:,} of {self.dense_bytes:,}"


class WeightFacts:
    """What may be asked of a weight that is packed: its shape, dtype and device. It is no tensor.

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


def _as_bytes(part: torch.Tensor) -> torch.Tensor:
    """View 16-bit scales of shape (out, groups) as bytes of shape (out, groups, 2): DDP cannot broadcast int16 buffers."""
    return part.unsqueeze(-1).view(torch.uint8) if part.dtype == torch.int16 else part


def _of_bytes(part: torch.Tensor) -> torch.Tensor:
    """Undo [`_as_bytes`]."""
    return part.view(torch.int16).squeeze(-1) if part.dtype == torch.uint8 and part.ndim == 3 else part


def _keeps_content(function, device: torch.device) -> bool:
    """Return True unless a function that modules apply to their tensors leaves them empty, as `to_empty` does."""
    if device.type == "meta":
        return False
    probe = torch.frombuffer(bytearray(os.urandom(16)), dtype=torch.uint8).to(device)
    result = function(probe)
    return not result.is_meta and result.dtype == probe.dtype and torch.equal(result.to(device), probe)
