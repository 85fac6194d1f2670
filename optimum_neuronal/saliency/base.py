"""What a saliency method is. To add one, add a file beside this one with a registered subclass of [`Saliency`]."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..registry import Registry


SALIENCIES = Registry("saliency", __package__)
register_saliency = SALIENCIES.register


@dataclass(frozen=True)
class Saliency(ABC):
    """Scores the weights of a projection. The fields of a subclass are its hyper-parameters (`saliency_args`).

    Class attributes:
        uses_activations (`bool`): False if the score depends on the weights alone, so that no calibration is needed.
    """

    name: ClassVar[str]
    uses_activations: ClassVar[bool] = True

    @abstractmethod
    def score(self, weight: torch.Tensor, activation: torch.Tensor | None) -> torch.Tensor:
        """Saliency of every weight. Within each row, the least salient weights are pruned.

        Args:
            weight (`Tensor` of float32, shape (out, in)): the projection's weight.
            activation (`Tensor` of float32, shape (in,)):
                L2 norm of every input feature, averaged over the calibration sequences (DESIGN section 2). None if
                the method declares `uses_activations = False`.

        Returns:
            `Tensor`: float32, shape (out, in), non-negative.
        """
