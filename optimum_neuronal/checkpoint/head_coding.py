"""Which weights of a checkpoint are stored in 8 bits without a mask: token embeddings and head, if they were rounded so."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..formats.int8_weight import Int8Weight, check_matrix
from ..formats.stand_in import StandIn
from ..system.notes import get_logger


logger = get_logger(__name__)


class HeadCoding:
    """Finds the 8-bit form of a checkpoint's token embeddings and head.

    What is saved is what is there: a weight that is not of 8 bits, such as one that was trained since, stays as it is,
    unless it is to be rounded.

    Args:
        sparsity_config (`Mapping`): from [`read_sparsity_config`], with `embedding_bits` and `head_weights`.
        names (`Iterable[str]`): of all weights of the checkpoint. They may begin otherwise than the sparsity_config has it.
        rounds (`bool`): whether values that are not of 8 bits are rounded.

    Attributes:
        names (`set[str]`): of the embeddings and the head in the checkpoint.
        not_coded (`list[str]`): those of them that were left as they are.
    """

    def __init__(self, sparsity_config: Mapping[str, Any], names: Iterable[str], rounds: bool = False):
        self.rounds = rounds
        self.not_coded: list[str] = []
        self.names = _found(sparsity_config.get("head_weights", ()), set(names))

    def code(self, name: str, tensor: torch.Tensor) -> Int8Weight | None:
        """A weight in 8 bits, None if it is stored as it is.

        Raises:
            `ValueError`: it is to be rounded, and is of another dtype, or has values that are not finite.
        """
        if name not in self.names:
            return None
        held = tensor.int8() if isinstance(tensor, StandIn) else None
        if held is not None and held.is_storable():
            return held
        dense = tensor.unpack() if isinstance(tensor, StandIn) else tensor.detach()
        try:
            check_matrix(dense)
        except ValueError as error:
            if self.rounds:
                raise ValueError(f"{name} cannot be rounded to 8 bits: {error}.") from error
            self.not_coded.append(name)
            return None
        coded = Int8Weight.rounded(dense) if self.rounds else Int8Weight.exact(dense)
        if coded is None:
            self.not_coded.append(name)
        return coded

    def tell(self) -> None:
        """Warns of the weights that were left as they are."""
        if self.not_coded:
            logger.warning(
                f"Saved with values as they are, since these are not of 8 bits: {', '.join(self.not_coded)}. They were changed "
                "after they were rounded; `optimum-cli neuronal convert DIR --format packed --embedding-bits 8` rounds them."
            )


def _found(recorded: Iterable[str], names: set[str]) -> set[str]:
    """Recorded names as a checkpoint has them, in which all may have some leading parts more or fewer."""
    ends = [
        {name for name in names if name == known or name.endswith(f".{known}") or known.endswith(f".{name}")}
        for known in recorded
    ]
    return {name for known, found in zip(recorded, ends) for name in ({known} if known in found else found)}
