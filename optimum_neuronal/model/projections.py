"""Projections, experts and blocks of a decoder, and sparse weights to try in place of its own."""

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from ..compat import hf_private
from .architectures import BLOCK_ENTRIES, FEEDS, MLP, MLP_ENTRIES, NEXT_BLOCK, Architecture
from .change import Change


ChangeOf = Callable[["Projection"], Change]  # projection -> change of its weight, shape (out, in)


@dataclass(frozen=True, eq=False)
class Projection:
    """A linear projection inside a decoder block.

    Its name is `"model.layers.0.self_attn.q_proj"`, or with an expert's number
    `"model.layers.0.mlp.experts.7.down_proj"`.
    """

    name: str
    role: str | None  # its purpose in the block, see `architectures`; None if only the user named it
    module: nn.Module  # of its weight: an `nn.Linear`, a `Conv1D`, or the experts of an MoE layer
    pruned: bool  # False if `targets` and `ignore` leave it out
    parameter: str = "weight"  # name of the weight in the module
    expert: int | None = None  # index in a weight of shape (experts, ., .)
    transposed: bool = False  # True if the parameter has the layout (in, out)

    @property
    def owner(self) -> nn.Parameter:
        """The parameter that holds the weight. Experts of a layer share it."""
        return getattr(self.module, self.parameter)

    @property
    def parent(self) -> str:
        """Name of the attention, MLP or expert of the projection."""
        return self.name.rpartition(".")[0]

    @property
    def group(self) -> str | None:
        """Common name of this projection in all experts of the layer; None outside of experts."""
        return None if self.expert is None else f"{self.parent.rpartition('.')[0]}.{self.parameter}"

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this projection's view, shape (out, in), of a tensor with its owner's layout."""
        part = tensor if self.expert is None else tensor[self.expert]
        return part.T if self.transposed else part

    @property
    def weight(self) -> torch.Tensor:
        """The weight as a view of shape (out, in)."""
        return self.view(self.owner.data)

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of output and input features."""
        sizes = tuple(self.owner.shape[-2:])
        return sizes[::-1] if self.transposed else sizes

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, eq=False)
class Experts:
    """The experts of an MoE layer: full name, module, and True if they take their inputs stacked (`Architecture`)."""

    name: str
    module: nn.Module
    stacked: bool


@dataclass(frozen=True)
class Place:
    """An input that rows feed, compared between the dense and the sparse model."""

    name: str  # of the projection or experts that read it, or of a block for its output
    features: int  # length of its activation


@dataclass(frozen=True, eq=False)
class Block:
    """A decoder block: full name, module, projections by name in the order of the module, and MoE layers' experts."""

    name: str
    module: nn.Module
    projections: Mapping[str, Projection]
    experts: Sequence[Experts] = ()

    @property
    def pruned(self) -> list[Projection]:
        return [projection for projection in self.projections.values() if projection.pruned]

    @property
    def numel(self) -> int:
        return sum(projection.numel for projection in self.pruned)

    @property
    def pruned_names(self) -> list[str]:
        return [projection.name for projection in self.pruned]

    @property
    def entry(self) -> str:
        """Name of the projection or experts that read the block's input."""
        first = next((p for p in self.projections.values() if p.role in BLOCK_ENTRIES), None)
        if first is not None:
            return first.name
        return next(iter(self.projections)) if self.mlp_input is None else self.mlp_input.name

    @cached_property
    def mlp_input(self) -> Place | None:
        """The MLP's input, by a reader that sees every token; None without one."""
        readers = [p for p in self.projections.values() if p.role in MLP_ENTRIES]
        first = next((p for p in readers if p.expert is None), None)
        if first is not None:
            return Place(first.name, first.shape[1])
        experts = next((experts for experts in self.experts if not experts.stacked), None)
        return Place(experts.name, readers[0].shape[1]) if experts else None

    @cached_property
    def siblings(self) -> dict[tuple[str, str | None], Projection]:
        """(name of an attention, MLP or expert, role) -> its projection of that role."""
        return {(p.parent, p.role): p for p in self.projections.values()}


@dataclass(frozen=True, eq=False)
class Decoder:
    """The part of a model that is pruned: its stack of blocks."""

    module: nn.Module  # runs the blocks
    blocks: Sequence[Block]
    architecture: Architecture
    config: object  # of the text model
    model: nn.Module  # the whole model

    @property
    def projections(self) -> dict[str, Projection]:
        """All projections to prune, by full name, from the first block to the last."""
        return {projection.name: projection for block in self.blocks for projection in block.pruned}

    @property
    def predicts_next_token(self) -> bool:
        return self.model.can_generate()

    def feeds_next_block(self, block: Block, projection: Projection) -> bool:
        """Return True if the projection's rows only feed the block's output."""
        fed = None if projection.role is None else FEEDS[projection.role]
        without_mlp = block.mlp_input is None or self.architecture.is_parallel(self.config)
        return fed == NEXT_BLOCK or (fed == MLP and without_mlp)

    def place_fed_by(self, block: Block, projection: Projection) -> Place | None:
        """Return the input that the projection's rows feed, None if that is not known."""
        fed = None if projection.role is None else FEEDS[projection.role]
        if fed is None:
            return None
        if self.feeds_next_block(block, projection):
            return Place(block.name, projection.shape[0])
        if fed == MLP:
            return block.mlp_input
        reader = block.siblings.get((projection.parent, fed))
        if reader is None:
            raise ValueError(
                f"{projection.parent} has no {fed!r} projection that reads the output of {projection.name}: use "
                "steps='block'."
            )
        return Place(reader.name, reader.shape[1])


def stored_names(decoder: Decoder, projection: Projection) -> list[str]:
    """Return the names of a projection's weight in a checkpoint's files, with `*` for every number.

    They differ from the model's where transformers converts weights when it saves, as it does with many experts.
    """
    owner = projection.owner
    name = next(name for name, parameter in decoder.model.named_parameters() if parameter is owner)
    stand_in = torch.empty(owner.shape, dtype=owner.dtype, device="meta")
    return sorted({with_stars(stored) for stored in hf_private.as_stored(decoder.model, {name: stand_in})})


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


def pattern_of(name: str) -> str:
    """Return a regular expression for a dotted name, with any number in place of each of its numbers."""
    return re.escape(with_stars(name)).replace(r"\*", r"\d+") + "$"


def patterns_of(chosen: Collection[str], names: Iterable[str]) -> list[str]:
    """Return regular expressions that match the `chosen` names among all of these: one for all numbers, if possible."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(pattern_of(name), []).append(name)
    patterns = []
    for pattern, members in kinds.items():
        matching = [name for name in members if name in chosen]
        patterns += [pattern] if len(matching) == len(members) else [f"{re.escape(name)}$" for name in matching]
    return patterns


def by_owner(projections: Iterable[Projection]) -> list[list[Projection]]:
    """Return the projections in groups that share a parameter. No weight is read."""
    groups: dict[nn.Parameter, list[Projection]] = {}
    for projection in projections:
        groups.setdefault(projection.owner, []).append(projection)
    return list(groups.values())


def trial_tensors(projections: Sequence[Projection], change_of: ChangeOf) -> dict[nn.Parameter, torch.Tensor]:
    """Return a sparse copy of every parameter of the projections, in its layout. Only one change exists at a time."""
    changed = {}
    for members in by_owner(projections):
        first, original = members[0], members[0].owner.data
        if first.expert is None and not first.transposed:
            changed[first.owner] = change_of(first).applied(original)
            continue
        changed[first.owner] = original.clone()
        for projection in members:
            change_of(projection).apply_to(projection.view(changed[first.owner]))
    return changed


@contextmanager
def trial_weights(projections: Sequence[Projection], change_of: ChangeOf) -> Iterator[None]:
    """Let projections compute with changed weights while the context lasts."""
    changed = trial_tensors(projections, change_of)
    originals = [(parameter, parameter.data) for parameter in changed]
    try:
        for parameter, trial in changed.items():
            parameter.data = trial
        yield
    finally:
        for parameter, original in originals:
            parameter.data = original
