"""MULTIFLOW: magnitude times the flow through the two neurons that a weight connects."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from .base import Saliency, register_saliency


@register_saliency("multiflow")
@dataclass(frozen=True)
class Multiflow(Saliency):
    """`|W_ij| * mean over j of (|W_ij| a_j) * mean over i of (|W_ij| a_j)` (Farina et al., MULTIFLOW, 2024).

    The mean over a row is one factor for the whole row, so it does not change the row's mask.
    """

    paper: ClassVar[str] = (
        "Farina et al., MULTIFLOW: Shifting Towards Task-Agnostic Vision-Language Pruning, CVPR 2024"
    )

    def score(self, weight: torch.Tensor, activation: torch.Tensor) -> torch.Tensor:
        magnitude = weight.abs()
        flow = magnitude * activation
        return magnitude * torch.outer(flow.mean(dim=1), flow.mean(dim=0))
