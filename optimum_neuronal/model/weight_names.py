"""Names of projections' weights in a checkpoint's files, and the projection of each stored weight."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from ..compat import hf_private
from .projections import Block, Decoder, Projection


def stored_names(model: PreTrainedModel, decoder: Decoder) -> dict[str, list[str]]:
    """Return kind of projection, see [`kind_of`] -> names of its weights in a checkpoint's files, `*` for every number.

    They differ from the model's where transformers converts weights when it saves, as it does with many experts.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, list[str]] = {}
    for block, projection in every_projection(decoder):
        kind = kind_of(block, projection)
        if kind not in found and projection.pruned:
            stand_in = torch.empty(projection.owner.shape, dtype=projection.owner.dtype, device="meta")
            stored = hf_private.as_stored(model, {names[id(projection.owner)]: stand_in})
            found[kind] = sorted({with_stars(name) for name in stored})
    return found


def token_weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return embeddings and head, if any, by their names in a checkpoint's files. Tied ones come once."""
    modules = (model.get_input_embeddings(), model.get_output_embeddings())
    found = {
        id(weight) for module in modules if isinstance(weight := getattr(module, "weight", None), torch.nn.Parameter)
    }
    named = model.named_parameters(remove_duplicate=False)
    return hf_private.stored_tensors(model, {name: weight for name, weight in named if id(weight) in found})


def every_projection(decoder: Decoder) -> Iterator[tuple[Block, Projection]]:
    for block in decoder.blocks:
        for projection in block.projections.values():
            yield block, projection


def kind_of(block: Block, projection: Projection) -> str:
    """Return the common name of a projection in all blocks and experts: `mlp.experts.*.down_proj`."""
    return with_stars(projection.name.removeprefix(f"{block.name}."))


def with_stars(name: str) -> str:
    """Return a dotted name with `*` for every number."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def natural_order(name: str) -> list[tuple[bool, int, str]]:
    """Return a key that sorts `layers.2` before `layers.10`."""
    return [
        (part.isdecimal(), int(part) if part.isdecimal() and len(part) < 20 else 0, part) for part in name.split(".")
    ]


def _numbers(name: str) -> list[str]:
    return [part for part in name.split(".") if part.isdecimal()]


def _fill(name: str, numbers: Iterable[str]) -> str:
    rest = iter(numbers)
    return ".".join(next(rest, part) if part == "*" else part for part in name.split("."))


@dataclass(frozen=True)
class StoredProjection:
    """The projection of a stored weight, or the projections of all experts in it."""

    block: str  # full name
    kind: str  # see `kind_of`
    left_out: frozenset[str] = frozenset()  # numbers of the experts in a stacked weight that were not pruned
    transposed: bool = False  # True if the model's parameter has the layout (in, out)


class PrunedWeights:
    """The pruned weights of a checkpoint, by its `sparsity_config`.

    The prefixes of the weights' `names` may differ from the config's, for example if a model was saved without its
    head.
    """

    def __init__(self, sparsity_config: Mapping[str, Any], names: Iterable[str]):
        self.blocks = sparsity_config.get("block_sparsity", {})
        self.left_out = set(sparsity_config.get("left_out", []))
        self._experts_left_out = _by_number(self.left_out)
        kinds = sparsity_config.get("projections", {})
        self._transposed = {kind for kind, about in kinds.items() if about.get("transposed")}
        self._kinds = {name: kind for kind, about in kinds.items() for name in about["weights"]}
        block = with_stars(next(iter(self.blocks), ""))
        for kind in kinds:  # names in packed files: those of the model
            self._kinds.setdefault(f"{block}.{kind}.weight", kind)
            self._kinds.setdefault(f"{block}.{kind.replace('.*.', '.')}", kind)  # stacked experts
        self._kinds_of_tails = {name.partition(".")[2]: kind for name, kind in self._kinds.items()}
        self._shift = self._find_shift({with_stars(name) for name in names})
        self._block = with_stars(next(iter(self.blocks), ""))

    def _find_shift(self, names: set[str]) -> int:
        """Return how many more components the checkpoint's names start with than the sparsity_config's."""
        shifts = (0, -1, 1, 2, 3)
        return next((shift for shift in shifts if any(self._known(name, shift) for name in names)), 0)

    def _known(self, name: str, shift: int) -> str | None:
        return self._kinds_of_tails.get(name) if shift < 0 else self._kinds.get(".".join(name.split(".")[shift:]))

    def find(self, name: str) -> StoredProjection | None:
        """Return the pruned projection of a stored weight, if it is one."""
        kind = self._known(with_stars(name), self._shift)
        if kind is None:
            return None
        numbers, depth = _numbers(name), self._block.count("*")
        block = _fill(self._block, numbers[:depth])
        if block not in self.blocks:
            return None
        full = _fill(f"{block}.{kind}", numbers[depth:])
        if "*" in full:  # all experts in one weight
            left_out = frozenset(self._experts_left_out.get(full, ()))
            return StoredProjection(block, kind, left_out, kind in self._transposed)
        return None if full in self.left_out else StoredProjection(block, kind, transposed=kind in self._transposed)


def _by_number(names: Iterable[str]) -> dict[str, set[str]]:
    """Return name with `*` for one of its numbers -> all numbers in this position."""
    found: dict[str, set[str]] = {}
    for name in names:
        parts = name.split(".")
        for index, part in enumerate(parts):
            if part.isdecimal():
                found.setdefault(".".join([*parts[:index], "*", *parts[index + 1 :]]), set()).add(part)
    return found
