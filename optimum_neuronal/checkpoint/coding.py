"""Which weights of a checkpoint are stored with values of few bits: those of pruned projections whose values are such."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..decoder.weight_names import PrunedWeights
from ..runtime.notes import get_logger
from ..sparsity.code_checks import CODED_DTYPES
from ..sparsity.coded import CodedWeight
from ..sparsity.stand_in import StandIn


logger = get_logger(__name__)


class Coding:
    """Finds the codes of a checkpoint's weights.

    What is saved is what is there: a weight whose values are not of few bits, such as one that was trained since, stays as
    it is, unless it is to be rounded.

    Args:
        sparsity_config (`Mapping`): from [`read_sparsity_config`], with `value_bits`.
        names (`Iterable[str]`): of all weights of the checkpoint.
        rounds (`bool`): whether values that are not of so many bits are rounded.

    Attributes:
        not_coded (`list[str]`): the pruned weights that were left as they are.
    """

    def __init__(self, sparsity_config: Mapping[str, Any], names: Iterable[str], rounds: bool = False):
        self.bits, self.rounds = sparsity_config["value_bits"], rounds
        self.not_coded: list[str] = []
        self._places = PrunedWeights(sparsity_config, names)

    def code(self, name: str, tensor: torch.Tensor) -> tuple[CodedWeight, bool] | None:
        """A weight's codes, and whether they are of the transposed one; None if it is stored as it is.

        Raises:
            `ValueError`: it is to be rounded, and has values that are not finite.
        """
        place = self._places.find(name)
        if place is None or place.left_out or tensor.ndim < 2 or tensor.dtype not in CODED_DTYPES:
            return None
        dense = tensor.unpack() if isinstance(tensor, StandIn) else tensor.detach()
        if not dense.isfinite().all():
            if self.rounds:
                raise ValueError(f"{name} has NaN or infinite values, which cannot have {self.bits} bits.")
            self.not_coded.append(name)
            return None
        # What is told of how it lies may be of another layout: experts are transposed by some families as they are saved.
        for transposed in (place.transposed, not place.transposed):
            coded = CodedWeight.exact(dense.mT if transposed else dense, self.bits)
            if coded is not None:
                return coded, transposed
        if self.rounds:
            return CodedWeight.nearest(dense.mT if place.transposed else dense, self.bits), place.transposed
        self.not_coded.append(name)
        return None

    def tell(self) -> None:
        """Warns of the weights that were left as they are."""
        if self.not_coded:
            logger.warning(
                f"{len(self.not_coded)} pruned weights, such as {self.not_coded[0]}, hold values of more than {self.bits} "
                "bits, since they were changed after they were rounded: they are saved as they are. To round them, use "
                f"`optimum-cli neuronal convert DIR --format packed --value-bits {self.bits}`."
            )
