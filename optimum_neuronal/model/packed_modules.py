"""Modules that hold a parameter packed: how to tell them, and the refusal of what needs the parameter itself."""

from abc import abstractmethod
from collections.abc import Iterator

import torch
from torch import nn

from ..formats.stand_in import StandIn


class PackedModule(nn.Module):
    """Holds a parameter that another module would have, or that was another module's, packed.

    Attributes:
        suffix (`str`): what follows the module's name in the parameter's: `".weight"`, or nothing.
        owned (`tuple[str, ...]`): names of the buffers that hold the parameter.
    """

    suffix: str
    owned: tuple[str, ...]

    @abstractmethod
    def stand_in(self) -> StandIn:
        """The parameter."""

    @property
    @abstractmethod
    def dense_bytes(self) -> int:
        """What the parameter takes unpacked."""

    @property
    @abstractmethod
    def packed_bytes(self) -> int:
        """What it takes as it is."""


def packed_modules(model: nn.Module) -> Iterator[tuple[str, PackedModule]]:
    """All packed modules of a model with their names."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, PackedModule))


def check_dense(model: nn.Module, purpose: str) -> None:
    """Raises `ValueError` if a model holds packed modules, which only compute.

    Args:
        model (`nn.Module`): any.
        purpose (`str`): what needs dense weights: `"to prune it"`.
    """
    count = sum(1 for _ in packed_modules(model))
    if count:
        raise ValueError(
            f"The model holds {count} packed weights, which only compute: call optimum_neuronal.densify(model) first "
            f"{purpose}."
        )


def dense_state(model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, StandIn]]:
    """A model's state as if it were dense, in two parts: what lies in it as it is, and what is packed."""
    state, packed = model.state_dict(), {}
    for name, module in packed_modules(model):
        for buffer in module.owned:
            state.pop(f"{name}.{buffer}", None)
        packed[f"{name}{module.suffix}"] = module.stand_in()
    return state, packed
