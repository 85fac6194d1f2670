"""Lets a model compute with sparse weights for a while."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from ..sparsity.changes import Change
from .projections import Projection


ChangeOf = Callable[[Projection], Change]  # what becomes of a projection's weight, in its view of shape (out, in)


@contextmanager
def trial_weights(projections: Sequence[Projection], change_of: ChangeOf) -> Iterator[None]:
    """While the context lasts, the projections compute with sparse weights.

    Args:
        projections (`Sequence[Projection]`): whose weights are replaced; the original tensors are put back.
        change_of: projection -> what becomes of its weight; asked for one at a time, so that only one exists.
    """
    by_owner: dict[nn.Parameter, list[Projection]] = {}
    for projection in projections:
        by_owner.setdefault(projection.owner, []).append(projection)
    originals = []
    try:
        for parameter, members in by_owner.items():
            original = parameter.data
            trial = _trial(original, members, change_of)
            originals.append((parameter, original))
            parameter.data = trial
        yield
    finally:
        for parameter, original in originals:
            parameter.data = original


def _trial(original: torch.Tensor, members: Sequence[Projection], change_of: ChangeOf) -> torch.Tensor:
    """A sparse copy of a parameter, in its own layout."""
    first = members[0]
    if first.expert is None and not first.transposed:
        return change_of(first).applied(original)
    trial = original.clone()
    for projection in members:
        change_of(projection).apply_to(projection.view(trial))
    return trial
