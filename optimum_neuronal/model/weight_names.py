"""The pruned projection of each weight in a checkpoint's files."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .projections import with_stars


def natural_order(name: str) -> list[tuple[bool, int, str]]:
    """Return a key that sorts `layers.2` before `layers.10`."""
    return [(part.isdecimal(), len(part) if part.isdecimal() else 0, part) for part in name.split(".")]


def _fill(name: str, numbers: Iterable[str]) -> str:
    rest = iter(numbers)
    return ".".join(next(rest, part) if part == "*" else part for part in name.split("."))


@dataclass(frozen=True)
class StoredProjection:
    """The projection of a stored weight, or the projections of all experts in it."""

    block: str  # full name
    kind: str  # see `kind_of`
    left_out: frozenset[str] = frozenset()  # numbers of the experts in a stacked weight that were not pruned


class PrunedWeights:
    """The pruned weights of a checkpoint, by its `sparsity_config`."""

    def __init__(self, sparsity_config: Mapping[str, Any]):
        self.blocks = sparsity_config.get("block_sparsity", {})
        self.left_out = set(sparsity_config.get("left_out", []))
        kinds = sparsity_config.get("projections", {})
        self._kinds = {name: kind for kind, about in kinds.items() for name in about["weights"]}
        self._block = with_stars(next(iter(self.blocks), ""))
        for kind in kinds:  # names in packed files: those of the model
            self._kinds.setdefault(f"{self._block}.{kind}.weight", kind)
            self._kinds.setdefault(f"{self._block}.{kind.replace('.*.', '.')}", kind)  # stacked experts

    def find(self, name: str) -> StoredProjection | None:
        """Return the pruned projection of a stored weight, if it is one.

        The name may have a different prefix than in the config, for example if a model was saved without its head.
        """
        starred = with_stars(name)
        alike = (known for known in self._kinds if known.endswith(f".{starred}") or starred.endswith(f".{known}"))
        kind = self._kinds.get(starred if starred in self._kinds else next(alike, ""))
        if kind is None:
            return None
        numbers, depth = [part for part in name.split(".") if part.isdecimal()], self._block.count("*")
        block = _fill(self._block, numbers[:depth])
        if block not in self.blocks:
            return None
        full = _fill(f"{block}.{kind}", numbers[depth:])
        if full in self.left_out:
            return None
        before, star, after = full.partition("*")  # a star: all experts are in one weight
        left_out = {name for name in self.left_out if star and name.startswith(before) and name.endswith(after)}
        left_out = frozenset(name.removeprefix(before).removesuffix(after) for name in left_out)
        return StoredProjection(block, kind, left_out)
