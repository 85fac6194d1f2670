"""Finds the weights of a checkpoint that are stored with quantised values, and these values.

Saving changes no value: a weight without exact codes, such as one that was trained since, stays as it is, unless values are
to be rounded.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from ..formats.code_checks import CODED_DTYPES, GROUP
from ..formats.coded import CodedWeight
from ..formats.int8_weight import BITS, Int8Weight
from ..formats.stand_in import StandIn
from ..model.weight_names import PrunedWeights
from ..system.notes import get_logger
from .stored_tensors import DTYPE_NAMES
from .stored_weights import coded_seed, int8_seed


logger = get_logger(__name__)

Parts = tuple[dict[str, torch.Tensor], dict[str, Any], int]  # tensors by name, metadata, CRC-32 of what both say


def find_codings(
    sparsity_config: Mapping[str, Any] | None, names: Collection[str], rounded: Collection[str] = ()
) -> "list[PrunedCoding | HeadCoding]":
    """Return the codings of a checkpoint: of its pruned weights, and of embeddings and head, if they have any.

    Args:
        sparsity_config (`Mapping`, *optional*): from [`read_sparsity_config`].
        names (`Collection[str]`): of all weights of the checkpoint.
        rounded (`Collection[str]`): `"value_bits"`, `"embedding_bits"` or both: values without exact codes are rounded.
    """
    recorded = sparsity_config or {}
    codings: list[PrunedCoding | HeadCoding] = []
    if recorded.get("value_bits") is not None:
        codings.append(PrunedCoding(recorded, names, "value_bits" in rounded))
    if recorded.get("embedding_bits") is not None:
        codings.append(HeadCoding(recorded, names, "embedding_bits" in rounded))
    return codings


class PrunedCoding:
    """Codes of pruned weights.

    Args:
        sparsity_config (`Mapping`): with `value_bits`.
        names (`Iterable[str]`): of all weights of the checkpoint.
        rounds (`bool`): True if values without exact codes are rounded.
    """

    def __init__(self, sparsity_config: Mapping[str, Any], names: Iterable[str], rounds: bool = False):
        self.bits, self.rounds = sparsity_config["value_bits"], rounds
        self._not_coded: list[str] = []
        self._places = PrunedWeights(sparsity_config, names)

    def parts(self, name: str, tensor: torch.Tensor) -> Parts | None:
        """Return the parts of a weight with codes; None if it has none, or is not smaller with them.

        Raises:
            `ValueError`: it is to be rounded, and has another dtype, or values that are not finite.
        """
        found = self._code(name, tensor)
        if found is None or found[0].nbytes >= tensor.numel() * tensor.element_size():
            return None
        weight, transposed = found
        dtype, shape = DTYPE_NAMES[weight.dtype], list(tensor.shape)
        facts = {"shape": shape, "bits": weight.bits, "group": GROUP, "dtype": dtype}
        if transposed:
            facts["transposed"] = True
        return weight.parts(name), facts, coded_seed(name, dtype, shape, weight.bits, transposed)

    def _code(self, name: str, tensor: torch.Tensor) -> tuple[CodedWeight, bool] | None:
        """Return a weight's codes, and True if they are of the transposed weight; None if it is stored as it is."""
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
            self._not_coded.append(name)
            return None
        # The recorded layout may be another: some families transpose experts as they are saved.
        for transposed in (place.transposed, not place.transposed):
            coded = CodedWeight.exact(dense.mT if transposed else dense, self.bits)
            if coded is not None:
                return coded, transposed
        if self.rounds:
            return CodedWeight.nearest(dense.mT if place.transposed else dense, self.bits), place.transposed
        self._not_coded.append(name)
        return None

    def warn(self) -> None:
        """Warn of the weights that were left as they are."""
        if self._not_coded:
            logger.warning(
                f"{len(self._not_coded)} pruned weights, such as {self._not_coded[0]}, are saved with values as they are, since these "
                f"are not of {self.bits} bits: they were changed after they were rounded, or some of their experts were not pruned. "
                f"`optimum-cli neuronal convert DIR --format packed --value-bits {self.bits}` rounds what was changed."
            )


def _problem(weight: torch.Tensor) -> str | None:
    """Return why a weight can have no codes, None if it can."""
    if weight.dtype not in CODED_DTYPES:
        return f"has the dtype {weight.dtype}, none of {', '.join(map(str, CODED_DTYPES))}"
    return None if bool(weight.isfinite().all()) else "has NaN or infinite values"


class HeadCoding:
    """The 8-bit form of token embeddings and head.

    Args:
        sparsity_config (`Mapping`): with `head_weights`.
        names (`Collection[str]`), rounds (`bool`): as for [`PrunedCoding`].
    """

    def __init__(self, sparsity_config: Mapping[str, Any], names: Collection[str], rounds: bool = False):
        self.rounds = rounds
        self._not_coded: list[str] = []
        self.names = head_names(sparsity_config.get("head_weights", ()), names)

    def parts(self, name: str, tensor: torch.Tensor) -> Parts | None:
        """Return the parts of a weight in 8 bits; as [`PrunedCoding.parts`]."""
        weight = self._code(name, tensor) if name in self.names else None
        if weight is None or weight.nbytes >= tensor.numel() * tensor.element_size():
            return None
        dtype, shape = DTYPE_NAMES[weight.dtype], list(tensor.shape)
        facts = {"shape": shape, "mask": False, "bits": BITS, "group": GROUP, "dtype": dtype}
        return weight.parts(name), facts, int8_seed(name, dtype, shape)

    def _code(self, name: str, tensor: torch.Tensor) -> Int8Weight | None:
        """Return a weight in 8 bits, None if it is stored as it is."""
        held = tensor.int8() if isinstance(tensor, StandIn) else None
        if held is not None and held.is_storable():
            return held
        dense = tensor.unpack() if isinstance(tensor, StandIn) else tensor.detach()
        try:
            coded = Int8Weight.rounded(dense) if self.rounds else Int8Weight.exact(dense)
        except ValueError as error:
            if self.rounds:
                raise ValueError(f"{name} cannot be rounded to 8 bits: {error}.") from error
            coded = None
        if coded is None:
            self._not_coded.append(name)
        return coded

    def warn(self) -> None:
        """Warn of the weights that were left as they are."""
        if self._not_coded:
            logger.warning(
                f"Saved with values as they are, since these are not of 8 bits: {', '.join(self._not_coded)}. They were changed "
                "after they were rounded; `optimum-cli neuronal convert DIR --format packed --embedding-bits 8` rounds them."
            )


def head_names(recorded: Iterable[str], names: Collection[str]) -> set[str]:
    """Return the checkpoint's names of the recorded weights, which may have some leading parts more or fewer."""
    found = set()
    for known in recorded:
        ends = {name for name in names if name.endswith(f".{known}") or known.endswith(f".{name}")}
        found |= {known} if known in names else ends
    return found
