"""Trial weights: a model computes with sparse weights while a context lasts."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from ..sparsity.masks import Change
from .projections import Projection


ChangeOf = Callable[[Projection], Change]  # the change of a weight in its view of shape (out, in)


@contextmanager
def trial_weights(projections: Sequence[Projection], change_of: ChangeOf) -> Iterator[None]:
    """Let the projections compute with sparse weights while the context lasts.

    Args:
        projections (`Sequence[Projection]`): whose weights are replaced; the original tensors are put back.
        change_of: projection -> the change of its weight; called for one at a time, so that only one exists.
    """
    with TrialWeights(projections, change_of).in_place():
        yield


class TrialWeights:
    """Sparse weights that are made once and put in place many times, at no cost.

    Args:
        projections (`Sequence[Projection]`), change_of: see [`trial_weights`].

    Attributes:
        tensors (`dict[Parameter, Tensor]`): parameter -> its replacement, in its own layout.
    """

    def __init__(self, projections: Sequence[Projection], change_of: ChangeOf):
        by_owner: dict[nn.Parameter, list[Projection]] = {}
        for projection in projections:
            by_owner.setdefault(projection.owner, []).append(projection)
        self.tensors = {owner: _trial(owner.data, members, change_of) for owner, members in by_owner.items()}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the projections compute with them while the context lasts."""
        originals = [(parameter, parameter.data) for parameter in self.tensors]
        try:
            for parameter, trial in self.tensors.items():
                parameter.data = trial
            yield
        finally:
            for parameter, original in originals:
                parameter.data = original


def _trial(original: torch.Tensor, members: Sequence[Projection], change_of: ChangeOf) -> torch.Tensor:
    """Return a sparse copy of a parameter, in its own layout."""
    first = members[0]
    if first.expert is None and not first.transposed:
        return change_of(first).applied(original)
    trial = original.clone()
    for projection in members:
        change_of(projection).apply_to(projection.view(trial))
    return trial
