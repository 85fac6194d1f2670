"""Lets a model compute with sparse weights for a while."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from ..sparsity.masks import Change
from .projections import Projection


ChangeOf = Callable[[Projection], Change]  # what becomes of a projection's weight, in its view of shape (out, in)


@contextmanager
def trial_weights(projections: Sequence[Projection], change_of: ChangeOf) -> Iterator[None]:
    """While the context lasts, the projections compute with sparse weights.

    Args:
        projections (`Sequence[Projection]`): whose weights are replaced; the original tensors are put back.
        change_of: projection -> what becomes of its weight; asked for one at a time, so that only one exists.
    """
    with TrialWeights(projections, change_of).in_place():
        yield


class TrialWeights:
    """Sparse weights that take their places again and again, each time at no cost.

    Args:
        projections (`Sequence[Projection]`), change_of: as for [`trial_weights`]; all are asked for at once.

    Attributes:
        tensors (`dict[Parameter, Tensor]`): parameter -> what takes its place, in its own layout.
    """

    def __init__(self, projections: Sequence[Projection], change_of: ChangeOf):
        by_owner: dict[nn.Parameter, list[Projection]] = {}
        for projection in projections:
            by_owner.setdefault(projection.owner, []).append(projection)
        self.tensors = {owner: _trial(owner.data, members, change_of) for owner, members in by_owner.items()}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """While the context lasts, the projections compute with them."""
        originals = [(parameter, parameter.data) for parameter in self.tensors]
        try:
            for parameter, trial in self.tensors.items():
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
