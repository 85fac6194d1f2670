"""A tensor that says of itself what a dense one would, but holds its elements packed."""

import torch

from .packed_matrix import PackedMatrix


class StandIn(torch.Tensor):
    """Has the shape, dtype and device of a dense tensor, whose elements it holds packed.

    Whoever takes tensors of checkpoints may be given one: it is told by `isinstance`, and spares him the dense tensor.
    """

    def unpack(self) -> torch.Tensor:
        """Return the dense tensor, bit-equal."""
        raise NotImplementedError

    def stored(self) -> tuple[PackedMatrix, bool]:
        """Return the tensor as files hold it, and True if its last two dimensions are swapped there."""
        raise NotImplementedError
