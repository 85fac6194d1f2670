"""Wanda: magnitude times the norm of the weight's input."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from .base import Saliency, register_saliency


@register_saliency("wanda")
@dataclass(frozen=True)
class Wanda(Saliency):
    """`|W_ij| * a_j` (Sun et al., A Simple and Effective Pruning Approach for Large Language Models, 2024, Eq. 1)."""

    paper: ClassVar[str] = "Sun et al., A Simple and Effective Pruning Approach for Large Language Models, ICLR 2024"
    summary: ClassVar[str] = "Wanda chose the weights, by their magnitude and that of their inputs."

    def score(self, weight: torch.Tensor, activation: torch.Tensor) -> torch.Tensor:
        return weight.abs() * activation
