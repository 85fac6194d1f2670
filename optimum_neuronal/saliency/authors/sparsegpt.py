"""SparseGPT as in the code of NeuronAL's authors."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from ...blocks.statistics import Hessian, SquaredNorms
from ..base import register_saliency
from ..sparsegpt import SparseGPT


class DecayingHessian(Hessian):
    """A Hessian whose squared norms weigh the n-th sequence by `1 / n`. The Hessian itself weighs all alike."""

    @property
    def value(self) -> torch.Tensor:
        squares = super().value
        return squares / torch.arange(1, len(squares) + 1, device=squares.device)[:, None]


@register_saliency("sparsegpt", variant="authors")
@dataclass(frozen=True)
class AuthorsSparseGPT(SparseGPT):
    """SparseGPT as it was run for the paper on NeuronAL.

    - Prunes one weight more than the target in every block of columns.
    - Prunes all weights of inputs that are always zero, beyond the target too.
    - Activations weigh the n-th sequence by `1 / n`. Only allocation reads them, as in NeuronAL's block step.
    """

    statistic: ClassVar[type[SquaredNorms]] = DecayingHessian

    def solve(self, weights, hessian, sparsities, pattern=None):
        weights = {name: torch.where(hessian.diagonal() == 0, 0, weight) for name, weight in weights.items()}
        return super().solve(weights, hessian, sparsities, pattern)

    def _count(self, rows: int, start: int, end: int, sparsity: float) -> int:
        return int(rows * (end - start) * sparsity) + 1
