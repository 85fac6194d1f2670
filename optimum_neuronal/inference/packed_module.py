"""What modules with packed weights have in common: buffers, conversion, what a state dict may hold, and refusals."""

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
    """

    def __init__(self, rows: Rows, transposed: bool):
        super().__init__()
        self.columns, self.transposed = rows.shape[1], transposed
        self.kind, self.owned = rows.kind, rows.names
        for name in rows.names:
            self.register_buffer(name, getattr(rows, name).detach())

    @property
    def rows(self) -> Rows:
        """What it holds, shared."""
        return rows_of(self.kind, [getattr(self, name) for name in self.owned], self.columns)

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

    def _apply(self, function, recurse: bool = True):
        dtype = function(self.held[:0]).dtype
        if dtype not in DTYPES:
            raise TypeError(f"Packed weights cannot be {dtype}: expected one of {', '.join(map(str, DTYPES))}.")
        return super()._apply(function, recurse)

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, errors):
        """Takes packed weights with any number of values or codes, and refuses damaged ones."""
        for name in set(self.owned) & {"values", "codes"}:
            given, own = state_dict.get(f"{prefix}{name}"), getattr(self, name)
            if given is not None and given.ndim == 1 and len(given) != len(own):
                setattr(self, name, own.new_empty(len(given)))
        known = len(errors)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, errors
        )
        if f"{prefix}weight" in state_dict:
            errors.append(f"{prefix}weight is dense, but the model's is packed: {ADVICE}.")
        elif len(errors) == known and not self.held.is_meta:
            try:
                self.rows.check()
            except ValueError as error:
                errors.append(f"{prefix}{self.owned[1]} is damaged: {error}.")

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
