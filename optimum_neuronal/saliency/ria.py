"""RIA: a weight's share of its row and of its column, times the norm of its input."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..common.validation import hyper
from .base import Saliency, register_saliency


@register_saliency("ria")
@dataclass(frozen=True)
class RIA(Saliency):
    """`(|W_ij| / sum_j |W_ij| + |W_ij| / sum_i |W_ij|) * a_j^power` (Zhang et al., Plug-and-Play, ICLR 2024, Eq. 3).

    Args:
        power (`float`): exponent of the activation, at least 0; the paper's is 0.5.
    """

    paper: ClassVar[str] = (
        "Zhang et al., Plug-and-Play: An Efficient Post-training Pruning Method for Large Language Models, ICLR 2024"
    )

    power: float = hyper(0.5, 0)

    def score(self, weight: torch.Tensor, activation: torch.Tensor) -> torch.Tensor:
        magnitude = weight.abs()
        tiny = torch.finfo(magnitude.dtype).tiny  # rows and columns of zeros score zero
        of_row = magnitude / magnitude.sum(dim=1, keepdim=True).clamp(min=tiny)
        of_column = magnitude / magnitude.sum(dim=0, keepdim=True).clamp(min=tiny)
        return (of_row + of_column) * activation**self.power
