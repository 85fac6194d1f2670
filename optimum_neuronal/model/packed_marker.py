"""Lets code that prunes recognize packed weights without importing what computes with them."""

from torch import nn


class HoldsPackedWeight:
    """A module whose weight is packed. `packed` has the only ones."""


def count_packed(model: nn.Module) -> int:
    """Return the number of packed weights in a model."""
    return sum(isinstance(module, HoldsPackedWeight) for module in model.modules())
