"""Sparse weights of a block with values of few bits. What shares a parameter, as experts do, shares a table of levels."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from ..model.projections import Projection
from ..saliency.rounding import SWEEPS, choose_levels, round_kept, round_nearest


class Solved(NamedTuple):
    """A projection's sparse weight that is still to be rounded.

    Args:
        projection ([`Projection`]): whose it is.
        sparse (`Tensor` of float32, shape (out, in)): the weight.
        importance (`Tensor` of float32, shape (in,)): what a squared error of each input's weights counts.
        target (`Tensor` of float32, shape (out, in), *optional*): the dense weight that it stands for.
        hessian (`Tensor` of float32, shape (in, in), *optional*): with `target`: sum of `x x^T` over its inputs.
    """

    projection: Projection
    sparse: torch.Tensor
    importance: torch.Tensor
    target: torch.Tensor | None = None
    hessian: torch.Tensor | None = None


def round_solved(solved: Sequence[Solved], bits: int, sweeps: int = SWEEPS) -> dict[str, torch.Tensor]:
    """Projection name -> weight of shape (out, in) whose values have so many bits, in its own dtype.

    Where there is a Hessian, every value makes up for the rounding of the others, see [`round_kept`].
    """
    by_owner: dict[nn.Parameter, list[Solved]] = {}
    for entry in solved:
        by_owner.setdefault(entry.projection.owner, []).append(entry)
    rounded = {}
    for owner, members in by_owner.items():
        levels = choose_levels([(entry.sparse, entry.importance) for entry in members], bits, owner.dtype)
        for projection, sparse, importance, target, hessian in members:
            if hessian is None:
                found = round_nearest(sparse, importance, levels, owner.dtype)
            else:
                found = round_kept(sparse, target, hessian, levels, owner.dtype, sweeps)
            rounded[projection.name] = found.to(owner.dtype)
    return rounded
