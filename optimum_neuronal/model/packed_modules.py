"""Modules that hold a packed parameter, and the state of the dense model around them."""

from abc import abstractmethod
from collections.abc import Iterator

import torch
from torch import nn

from ..packed.formats.stand_in import StandIn


class PackedModule(nn.Module):
    """A module with a packed parameter: its own, or another module's.

    Attributes:
        suffix (`str`): follows the module's name in the parameter's: `".weight"`, or nothing.
        owned (`tuple[str, ...]`): names of the buffers that hold the parameter.
    """

    suffix: str
    owned: tuple[str, ...]

    @abstractmethod
    def stand_in(self) -> StandIn:
        """Return the parameter."""

    @property
    @abstractmethod
    def dense_bytes(self) -> int:
        """Bytes of the unpacked parameter."""

    @property
    @abstractmethod
    def packed_bytes(self) -> int:
        """Bytes of the packed parameter."""


def packed_modules(model: nn.Module) -> Iterator[tuple[str, PackedModule]]:
    """Return all packed modules of a model with their names."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, PackedModule))


def dense_state(model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, StandIn]]:
    """Return the state of the dense model in two parts: its tensors, and stand-ins for packed weights.

    A packed module in several places has a stand-in for each.
    """
    state, packed = model.state_dict(), {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, PackedModule):
            for buffer in module.owned:
                state.pop(f"{name}.{buffer}", None)
            packed[f"{name}{module.suffix}"] = module.stand_in()
    return state, packed
