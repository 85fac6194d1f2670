"""A tensor that says of itself what a dense one would, but holds its elements packed."""

import torch

from .coded import CodedWeight
from .int8_weight import Int8Weight
from .packed import PackedWeight


class StandIn(torch.Tensor):
    """Has the shape, dtype and device of a dense tensor, whose elements it holds packed.

    Whoever takes tensors of checkpoints may be given one: it is told by `isinstance`, and spares him the dense tensor.
    """

    def unpack(self) -> torch.Tensor:
        """The dense tensor, bit-equal."""
        raise NotImplementedError

    def packed(self) -> PackedWeight | None:
        """The tensor as files hold it, None if it cannot be had without unpacking."""
        raise NotImplementedError

    def coded(self) -> tuple[CodedWeight, bool] | None:
        """The tensor as files hold it whose values are codes of few bits, and whether its last two dimensions are swapped
        there; None if its values are none."""
        return None

    def int8(self) -> Int8Weight | None:
        """The tensor as files hold it in 8 bits without a mask; None if it is none."""
        return None
