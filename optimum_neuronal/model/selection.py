"""Which projections of a model are meant: those that match the user's patterns, or those that a `sparsity_config` names."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from .weight_names import with_stars


class Patterns:
    """The user's `targets` and `ignore`, with a note of the patterns that matched something."""

    def __init__(self, targets: Sequence[str] | None, ignore: Sequence[str] | None):
        self.targets, self.ignore = targets, ignore or ()
        self.unmatched = {*(targets or ()), *self.ignore}

    def ignores(self, name: str) -> bool:
        """Whether the projection is left out."""
        return self._matches(self.ignore, name)

    def targets_it(self, name: str) -> bool:
        """Whether the projection is named."""
        return self.targets is not None and self._matches(self.targets, name)

    def takes(self, name: str) -> bool:
        """Whether the projection is meant."""
        targeted = self.targets is None or self.targets_it(name)
        return not self.ignores(name) and targeted

    def _matches(self, patterns: Sequence[str], name: str) -> bool:
        matching = [pattern for pattern in patterns if re.search(pattern, name)]
        self.unmatched.difference_update(matching)
        return bool(matching)

    def check(self, model: nn.Module, count: int) -> None:
        """Raises `ValueError` if a pattern matched nothing, most likely mistyped, or if none of the projections is meant."""
        for name, _ in model.named_modules():  # leaving out what is left out anyway (a router, lm_head) is no mistake
            self._matches(self.ignore, name)
        if self.unmatched:
            raise ValueError(
                f"These patterns of targets and ignore match no projection: {sorted(self.unmatched)}. They are "
                "regular expressions over full names such as 'model.layers.0.self_attn.q_proj'."
            )
        if not count:
            raise ValueError(f"targets={self.targets} and ignore={self.ignore} leave no projection to prune.")


class Recorded:
    """The projections that were pruned, by the names in a `sparsity_config`. They are compared, and nothing is run.

    Args:
        sparsity_config (`Mapping`): from `read_sparsity_config`, with `block_sparsity` and `projections`.
        blocks (`str`):
            Name of the model's list of blocks. It may differ from the recorded one, as in a model without its head.

    Raises:
        `ValueError`: it does not name blocks of one list.
    """

    def __init__(self, sparsity_config: Mapping[str, Any], blocks: str):
        self._blocks = f"{blocks}."
        recorded = next(iter(sparsity_config["block_sparsity"]), "").rpartition(".")[0]
        for name in sparsity_config["block_sparsity"]:
            if name.rpartition(".")[0] != recorded:
                raise ValueError(f"sparsity_config.block_sparsity names {name!r}: expected blocks of {recorded!r}.")
        self._numbers = {name.rpartition(".")[2] for name in sparsity_config["block_sparsity"]}
        self._kinds = set(sparsity_config["projections"])
        self._left_out = {name.removeprefix(f"{recorded}.") for name in sparsity_config.get("left_out", ())}
        self._unseen = {"block_sparsity": set(self._numbers), "projections": set(self._kinds)}

    def takes(self, name: str) -> bool:
        """Whether the projection was pruned."""
        place = name.removeprefix(self._blocks)
        number, _, local = place.partition(".")
        kind = with_stars(local)
        if number not in self._numbers or kind not in self._kinds:
            return False
        self._unseen["block_sparsity"].discard(number)
        self._unseen["projections"].discard(kind)
        return place not in self._left_out

    def targets_it(self, name: str) -> bool:
        """Whether the projection is named."""
        return self.takes(name)

    def ignores(self, name: str) -> bool:
        """Whether the projection was left out."""
        return not self.takes(name)

    def check(self, model: nn.Module, count: int) -> None:
        """Raises `ValueError` if what was recorded is not in the model."""
        for key, unseen in self._unseen.items():
            if unseen or not count:
                missing = f"names {min(unseen)!r}, which the model does not have" if unseen else "names no projection"
                raise ValueError(
                    f"model.config.sparsity_config.{key} {missing}: load the model as it was pruned; or del "
                    "model.config.sparsity_config to take the zeros that there are for pruned."
                )
