"""Magnitude: the larger a weight, the more it matters."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from .base import Saliency, register_saliency


@register_saliency("magnitude")
@dataclass(frozen=True)
class Magnitude(Saliency):
    """`|W|`; needs no calibration data."""

    uses_activations: ClassVar[bool] = False

    def score(self, weight: torch.Tensor, activation: torch.Tensor | None = None) -> torch.Tensor:
        return weight.abs()
