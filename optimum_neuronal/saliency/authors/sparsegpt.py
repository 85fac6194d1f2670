"""SparseGPT as in the code of NeuronAL's authors."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from ...blocks.statistics import Hessian, SquaredNorms
from ...common.torch_state import full_precision
from ..base import register_saliency
from ..sparsegpt import SparseGPT


class DecayingHessian(Hessian):
    """A Hessian whose squared norms weight the n-th sequence by `1 / n`.

    The Hessian itself weights all sequences equally: it is twice the mean of their `x x^T`.
    """

    def __init__(self):
        super().__init__()
        self._sequences = 0

    def _add_products(self, inputs: torch.Tensor) -> None:
        if self.hessian is None:
            self.hessian = inputs.new_zeros(inputs.shape[-1], inputs.shape[-1])
        self._sequences += 1
        inputs = math.sqrt(2 / self._sequences) * inputs
        with full_precision():
            # Added to the rest as a product of its own, which rounds as in their code.
            self.hessian.mul_((self._sequences - 1) / self._sequences).add_(inputs.T @ inputs)

    @property
    def value(self) -> torch.Tensor:
        squares = super().value
        return squares / torch.arange(1, len(squares) + 1, device=squares.device)[:, None]


@register_saliency("sparsegpt", variant="authors")
@dataclass(frozen=True)
class AuthorsSparseGPT(SparseGPT):
    """SparseGPT as it was run for the paper on NeuronAL.

    - Prunes one weight more than the target in every block of columns.
    - Prunes all weights of inputs that are always zero, beyond the target too. These count as one in the mean diagonal
      of which dampening is a share.
    - Activations weight the n-th sequence by `1 / n`. Only allocation reads them, as in NeuronAL's block step.
    """

    statistic: ClassVar[type[SquaredNorms]] = DecayingHessian

    def solve(self, weights, hessian, sparsities, pattern=None):
        dead = hessian.diagonal() == 0
        weights = {name: torch.where(dead, 0, weight) for name, weight in weights.items()}
        return super().solve(weights, hessian + dead.to(hessian.dtype).diag(), sparsities, pattern)

    def _count(self, rows: int, start: int, end: int, sparsity: float) -> int:
        return int(rows * (end - start) * sparsity) + 1
