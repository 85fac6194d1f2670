"""GPTQ (Frantar et al., 2022), written out as a method of this package, to compare with: dense, asymmetric, by groups.

Every row and group of columns has a scale and an offset, from its least and largest weight when its first column is
reached; columns are rounded in their order, and those to come make up for each. Groups and dampening are its fields.
"""

from dataclasses import dataclass

import torch

from optimum_neuronal.saliency.base import WeightUpdate, register_saliency
from optimum_neuronal.saliency.dampening import DampenedHessian
from optimum_neuronal.saliency.sparsegpt import _inverse_factor


SCALE_AND_OFFSET = 32  # bits of a group beside its codes: two numbers of 16


@register_saliency("gptq")
@dataclass(frozen=True)
class GPTQ(WeightUpdate):
    """Rounds all weights to few bits, whatever the sparsity asked for.

    Args:
        bits (`int`): of a weight.
        group (`int`): columns that share a scale and an offset.
        dampening (`float`): share of the Hessian's mean diagonal that is added to its diagonal.
    """

    bits: int = 4
    group: int = 64
    dampening: float = 0.01

    @property
    def bits_per_weight(self) -> float:
        return self.bits + SCALE_AND_OFFSET / self.group

    def score(self, weight, activation):
        return (weight * activation).square()

    def prune(self, weight, hessian, sparsity, pattern=None, name="the weight"):
        weight = weight.clone()
        weight[:, hessian.diagonal() == 0] = 0
        factor = DampenedHessian(hessian, self.dampening, name).solve(_inverse_factor)
        for column in range(weight.shape[1]):
            if column % self.group == 0:
                low, step = self._grid(weight[:, column : column + self.group])
            code = ((weight[:, column] - low) / step).round().clamp(0, 2**self.bits - 1)
            rounded = low + code * step
            error = (weight[:, column] - rounded) / factor[column, column]
            weight[:, column + 1 :] -= torch.outer(error, factor[column, column + 1 :])
            weight[:, column] = rounded
        return weight

    def _grid(self, group: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The offset and the step of every row; zero is among what can be said, as in the authors' code."""
        low, high = group.amin(dim=1).clamp(max=0), group.amax(dim=1).clamp(min=0)
        step = ((high - low) / (2**self.bits - 1)).clamp(min=1e-12)
        return (low / step).round() * step, step
