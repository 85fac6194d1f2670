"""Which weights of a checkpoint are stored with values of few bits: those of pruned projections whose values are such."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..formats.code_checks import CODED_DTYPES
from ..formats.coded import CodedWeight
from ..formats.stand_in import StandIn
from ..model.weight_names import PrunedWeights
from ..system.notes import get_logger


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
            `ValueError`: it is to be rounded, and is of another dtype, or has values that are not finite.
        """
        place = self._places.find(name)
        if place is None or tensor.ndim < 2 or not tensor.is_floating_point():
            return None
        held = tensor.coded() if isinstance(tensor, StandIn) else None
        if held is not None and held[0].bits == self.bits and held[0].is_storable():
            return held
        dense = tensor.unpack() if isinstance(tensor, StandIn) else tensor.detach()
        if place.left_out or (problem := _problem(dense)):
            if self.rounds and not place.left_out:
                raise ValueError(f"{name} {problem}: its values cannot be rounded to {self.bits} bits.")
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
                f"{len(self.not_coded)} pruned weights, such as {self.not_coded[0]}, are saved with values as they are, since these "
                f"are not of {self.bits} bits: they were changed after they were rounded, or some of their experts were not pruned. "
                f"`optimum-cli neuronal convert DIR --format packed --value-bits {self.bits}` rounds what was changed."
            )


def _problem(weight: torch.Tensor) -> str | None:
    """Why a weight can have no codes."""
    if weight.dtype not in CODED_DTYPES:
        return f"has the dtype {weight.dtype}, none of {', '.join(map(str, CODED_DTYPES))}"
    return None if bool(weight.isfinite().all()) else "has NaN or infinite values"
