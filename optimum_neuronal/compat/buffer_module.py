"""A module that derives something from its buffers, by private methods of torch's modules, and what models read of it."""

from abc import abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


class BufferModule(nn.Module):
    """A module whose buffers may have another layout in memory than in state dicts."""

    @property
    def held(self) -> dict[str, torch.Tensor | None]:
        """The buffers by name. A look-up here is faster than an attribute of a module."""
        return self._buffers

    @abstractmethod
    def restore_layout(self) -> None:
        """Hold the buffers of a state dict, before they change."""

    @abstractmethod
    def check(self) -> Any:
        """Check buffers that have changed, and arrange them. Raise `ValueError` if they are damaged."""

    @abstractmethod
    def stored(self) -> dict[str, torch.Tensor]:
        """Return what a state dict holds instead of buffers in another layout."""

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "BufferModule":
        self.restore_layout()
        super()._apply(fn, recurse)
        if not any(buffer is not None and buffer.is_meta for buffer in self._buffers.values()):
            with suppress(ValueError):  # the next use raises it
                self.check()  # now, since a graph of torch.compile or of the device cannot
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.update({prefix + name: tensor for name, tensor in self.stored().items()})

    def _load_from_state_dict(self, state_dict, prefix, metadata, strict, missing, unexpected, errors) -> None:
        self.restore_layout()
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, unexpected, errors)
        if any(prefix + name in state_dict for name in self._buffers):
            try:
                self.check()
            except ValueError as error:
                errors.append(f"{prefix.removesuffix('.')}: {error}")


@dataclass(frozen=True)
class WeightInfo:
    """What models read of a weight, without its elements."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    requires_grad = False
    _is_hf_initialized = True  # transformers does not initialize it

    def size(self) -> torch.Size:  # `resize_token_embeddings` calls it
        return self.shape


HOOKS = [name for name in vars(nn.Module()) if "hook" in name]


def inherit_hooks(new: nn.Module, old: nn.Module) -> nn.Module:
    """Give a module the mode and the hooks of the module that it replaces, and return it."""
    new.train(old.training)
    for name in HOOKS:
        setattr(new, name, getattr(old, name))
    return new
