"""Finds the weights of a checkpoint that are stored with quantised values, and these values."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..formats.code_checks import CODED_DTYPES
from ..formats.coded import CodedWeight
from ..formats.int8_weight import Int8Weight, check_matrix
from ..formats.stand_in import StandIn
from ..model.weight_names import PrunedWeights
from ..system.notes import get_logger


logger = get_logger(__name__)


class Coding:
    """Finds the codes of a checkpoint's pruned weights.

    Saving changes no value: a weight without exact codes, such as one that was trained since, stays as it is, unless
    values are to be rounded.

    Args:
        sparsity_config (`Mapping`): from [`read_sparsity_config`], with `value_bits`.
        names (`Iterable[str]`): of all weights of the checkpoint.
        rounds (`bool`): True if values without exact codes are rounded.

    Attributes:
        not_coded (`list[str]`): the pruned weights that were left as they are.
    """

    def __init__(self, sparsity_config: Mapping[str, Any], names: Iterable[str], rounds: bool = False):
        self.bits, self.rounds = sparsity_config["value_bits"], rounds
        self.not_coded: list[str] = []
        self._places = PrunedWeights(sparsity_config, names)

    def code(self, name: str, tensor: torch.Tensor) -> tuple[CodedWeight, bool] | None:
        """Return a weight's codes, and True if they are of the transposed weight; None if it is stored as it is.

        Raises:
            `ValueError`: it is to be rounded, and has another dtype, or values that are not finite.
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
        # The recorded layout may be another: some families transpose experts as they are saved.
        for transposed in (place.transposed, not place.transposed):
            coded = CodedWeight.exact(dense.mT if transposed else dense, self.bits)
            if coded is not None:
                return coded, transposed
        if self.rounds:
            return CodedWeight.nearest(dense.mT if place.transposed else dense, self.bits), place.transposed
        self.not_coded.append(name)
        return None

    def warn(self) -> None:
        """Warn of the weights that were left as they are."""
        if self.not_coded:
            logger.warning(
                f"{len(self.not_coded)} pruned weights, such as {self.not_coded[0]}, are saved with values as they are, since these "
                f"are not of {self.bits} bits: they were changed after they were rounded, or some of their experts were not pruned. "
                f"`optimum-cli neuronal convert DIR --format packed --value-bits {self.bits}` rounds what was changed."
            )


def _problem(weight: torch.Tensor) -> str | None:
    """Return why a weight can have no codes, None if it can."""
    if weight.dtype not in CODED_DTYPES:
        return f"has the dtype {weight.dtype}, none of {', '.join(map(str, CODED_DTYPES))}"
    return None if bool(weight.isfinite().all()) else "has NaN or infinite values"


class HeadCoding:
    """Finds the 8-bit form of a checkpoint's token embeddings and head.

    Saving changes no value: a weight that is not of 8 bits, such as one that was trained since, stays as it is, unless
    values are to be rounded.

    Args:
        sparsity_config (`Mapping`): from [`read_sparsity_config`], with `embedding_bits` and `head_weights`.
        names (`Iterable[str]`): of all weights of the checkpoint. They may have some leading parts more or fewer than those
            of the sparsity_config.
        rounds (`bool`): True if values that are not of 8 bits are rounded.

    Attributes:
        names (`set[str]`): of the embeddings and the head in the checkpoint.
        not_coded (`list[str]`): those of them that were left as they are.
    """

    def __init__(self, sparsity_config: Mapping[str, Any], names: Iterable[str], rounds: bool = False):
        self.rounds = rounds
        self.not_coded: list[str] = []
        self.names = _found(sparsity_config.get("head_weights", ()), set(names))

    def code(self, name: str, tensor: torch.Tensor) -> Int8Weight | None:
        """Return a weight in 8 bits, None if it is stored as it is.

        Raises:
            `ValueError`: it is to be rounded, and has another dtype, or values that are not finite.
        """
        if name not in self.names:
            return None
        held = tensor.int8() if isinstance(tensor, StandIn) else None
        if held is not None and held.is_storable():
            return held
        dense = tensor.unpack() if isinstance(tensor, StandIn) else tensor.detach()
        coded = None
        try:
            check_matrix(dense)
            coded = Int8Weight.rounded(dense) if self.rounds else Int8Weight.exact(dense)
        except ValueError as error:
            if self.rounds:
                raise ValueError(f"{name} cannot be rounded to 8 bits: {error}.") from error
        if coded is None:
            self.not_coded.append(name)
        return coded

    def warn(self) -> None:
        """Warn of the weights that were left as they are."""
        if self.not_coded:
            logger.warning(
                f"Saved with values as they are, since these are not of 8 bits: {', '.join(self.not_coded)}. They were changed "
                "after they were rounded; `optimum-cli neuronal convert DIR --format packed --embedding-bits 8` rounds them."
            )


def _found(recorded: Iterable[str], names: set[str]) -> set[str]:
    """Return the checkpoint's names of the recorded weights, which may have some leading parts more or fewer."""
    ends = [
        {name for name in names if name == known or name.endswith(f".{known}") or known.endswith(f".{name}")}
        for known in recorded
    ]
    return {name for known, found in zip(recorded, ends) for name in ({known} if known in found else found)}
