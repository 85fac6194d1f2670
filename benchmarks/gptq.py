"""GPTQ (Frantar et al., 2022), written out as a method of this package, to compare with: dense, asymmetric, by groups.

Every row and group of columns has a scale and an offset, from its least and largest weight; the columns of the largest
inputs are quantised first, and later columns compensate for each. `benchmarks.gptq_kept` compares it with llm-compressor's.
"""

from dataclasses import dataclass

import torch

from optimum_neuronal.saliency.base import DampenedHessian, WeightUpdate, inverse_factor, register_saliency


SCALE_AND_OFFSET = 32  # bits of a group beside its codes: two numbers of 16


@register_saliency("gptq")
@dataclass(frozen=True)
class GPTQ(WeightUpdate):
    """Rounds all weights to few bits, whatever the sparsity asked for.

    Args:
        bits (`int`): of a weight.
        group (`int`): columns that share a scale and an offset.
        dampening (`float`): share of the Hessian's mean diagonal that is added to its diagonal.
        ordered (`bool`): the columns of the largest inputs first, rather than as they stand.
    """

    bits: int = 4
    group: int = 64
    dampening: float = 0.01
    ordered: bool = True

    @property
    def bits_per_weight(self) -> float:
        return self.bits + SCALE_AND_OFFSET / self.group

    def score(self, weight, activation):
        return (weight * activation).square()

    def prune(self, weight, hessian, sparsity, pattern=None, name="the weight"):
        weight = weight.clone()
        weight[:, hessian.diagonal() == 0] = 0
        offset, step = (part.repeat_interleave(self.group, 1)[:, : weight.shape[1]] for part in self.grid(weight))
        columns = torch.arange(weight.shape[1], device=weight.device)
        if self.ordered:
            columns = hessian.diagonal().argsort(descending=True, stable=True)
        factor = DampenedHessian(hessian[columns][:, columns], self.dampening, name).solve(inverse_factor)
        for place, column in enumerate(columns.tolist()):
            code = (weight[:, column] / step[:, column] + offset[:, column]).round().clamp(0, 2**self.bits - 1)
            rounded = (code - offset[:, column]) * step[:, column]
            error = (weight[:, column] - rounded) / factor[place, place]
            weight[:, columns[place + 1 :]] -= torch.outer(error, factor[place, place + 1 :])
            weight[:, column] = rounded
        return weight

    def grid(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The offset and the step of every row and group, (out, groups); zero is among what can be said."""
        groups = weight.split(self.group, dim=1)
        low = torch.stack([group.amin(dim=1) for group in groups], dim=1).clamp(max=0)
        high = torch.stack([group.amax(dim=1) for group in groups], dim=1).clamp(min=0)
        step = ((high - low) / (2**self.bits - 1)).clamp(min=1e-12)
        return (-low / step).round(), step
