"""Saliencies that score each weight by itself: Magnitude, Wanda, MULTIFLOW and RIA."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..common.validation import hyper
from .base import Saliency, register_saliency


@register_saliency("magnitude")
@dataclass(frozen=True)
class Magnitude(Saliency):
    """`|W|`; needs no calibration data."""

    uses_activations: ClassVar[bool] = False

    def score(self, weight: torch.Tensor, activation: torch.Tensor | None = None) -> torch.Tensor:
        return weight.abs()


@register_saliency("wanda")
@dataclass(frozen=True)
class Wanda(Saliency):
    """`|W_ij| * a_j` (Sun et al., A Simple and Effective Pruning Approach for Large Language Models, 2024, Eq. 1)."""

    paper: ClassVar[str] = "Sun et al., A Simple and Effective Pruning Approach for Large Language Models, ICLR 2024"
    summary: ClassVar[str] = "Wanda chose the weights, by their magnitude and that of their inputs."

    def score(self, weight: torch.Tensor, activation: torch.Tensor) -> torch.Tensor:
        return weight.abs() * activation


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
