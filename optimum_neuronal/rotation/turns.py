"""Says how a rotation changes every parameter of a model, wherever its weights are."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from ..blocks.offload import Turn
from ..blocks.statistics import wide_dtype
from ..model.projections import Projection
from .norms import neutral_value, scale_of
from .parts import BlockParts, Heads, RotatedParts, bias_of


ROWS = 4096  # of a matrix that are computed at a time

Read = Callable[[nn.Module, str], torch.Tensor]  # a module, the name of its parameter -> the original tensor
# A module, the name of its parameter -> what changes it, in this order.
Turns = dict[tuple[nn.Module, str], list[Turn]]


def find_turns(parts: RotatedParts, stream: torch.Tensor | None, heads: Sequence[torch.Tensor], read: Read) -> Turns:
    """Return how every parameter changes. Products with the identity are left out: they change no bit.

    Args:
        parts ([`RotatedParts`]): of the model.
        stream (`Tensor`, *optional*), heads (`Sequence[Tensor]`): as of [`Rotations`].
        read: module, name of its parameter -> the original tensor.
    """
    turns: Turns = {}
    stream = _unless_identity(stream)
    for own, turned in zip(parts.blocks, map(_unless_identity, heads)):
        scales = {p: _scale(norm, read) for norm, readers in own.folds for p in readers}
        for projection in {**scales, **dict.fromkeys((*own.writers, own.heads.writer, own.heads.reader))}:
            turn = ProjectionTurn(projection, own, scales.get(projection), stream, turned)
            turns.setdefault((projection.module, projection.parameter), []).append(turn.weight)
            if bias_of(projection) is not None:
                turns[projection.module, "bias"] = [turn.bias]
    if parts.rotates_stream:
        for embeddings in parts.embeddings:
            turns[embeddings, "weight"] = [partial(_turn_table, None, stream)]
        scale = _scale(parts.final_norm, read)
        turns[parts.model.get_output_embeddings(), "weight"] = [partial(_turn_table, scale, stream)]
        if parts.entrance is not None:
            for name, _ in parts.entrance.named_parameters():
                turns[parts.entrance, name] = [partial(_turn_entrance, stream)]
    for norm in parts.norms:
        changes = {"weight": partial(_neutralise, norm), "bias": partial(_turn_norm_bias, _scale(norm, read), stream)}
        turns |= {(norm, name): [changes[name]] for name, _ in norm.named_parameters()}
    return turns


def _scale(norm: nn.Module, read: Read) -> torch.Tensor:
    """Return the factor by which a norm scales every feature, in the widest type: shape (hidden,), () without a weight."""
    if getattr(norm, "weight", None) is None:
        return torch.ones(())
    weight = read(norm, "weight")
    return scale_of(norm, weight.to(wide_dtype(weight.device)))


@dataclass(frozen=True, eq=False)
class ProjectionTurn:
    """The change of a projection's weight and bias.

    Args:
        projection ([`Projection`]): of the block.
        parts ([`BlockParts`]): of the block.
        scale (`Tensor`, *optional*): of the norm in front of it, shape (in,), if it reads the stream.
        stream, heads (`Tensor`, *optional*): the rotations. None: the identity.
    """

    projection: Projection
    parts: BlockParts
    scale: torch.Tensor | None
    stream: torch.Tensor | None
    heads: torch.Tensor | None

    def weight(self, original: torch.Tensor, into: torch.Tensor) -> None:
        """Write the turned weight, of the owner's layout, from the original one."""
        layout, weight = self.parts.heads, _wide(self.projection.view(original), into.device)
        if self.scale is not None:
            weight = weight * _like(self.scale, weight)
            if self.stream is not None:
                weight = weight @ _like(self.stream, weight)
        if self.heads is not None and self.projection is layout.writer:
            weight[layout.rows] = _turn_rows(weight[layout.rows], self.heads)
        if self.heads is not None and self.projection is layout.reader:
            weight = turn_columns(weight, self.heads, layout)
        if self.stream is not None and self.projection in self.parts.writers:
            weight = _like(self.stream, weight).T @ weight
        self.projection.view(into).copy_(weight)

    def bias(self, original: torch.Tensor, into: torch.Tensor) -> None:
        """Write the turned bias from the original one."""
        layout, bias = self.parts.heads, _wide(original, into.device)
        if self.heads is not None and self.projection is layout.writer:
            bias[layout.rows] = _turn_rows(bias[layout.rows, None], self.heads)[:, 0]
        if self.stream is not None and self.projection in self.parts.writers:
            bias = _like(self.stream, bias).T @ bias
        into.copy_(bias)


def _turn_table(
    scale: torch.Tensor | None, stream: torch.Tensor | None, original: torch.Tensor, into: torch.Tensor
) -> None:
    """Write a turned matrix that reads the stream, or is added to it, by pieces: a vocabulary in float64 takes gigabytes."""
    for own, piece in zip(into.split(ROWS), original.split(ROWS)):
        wide = _wide(piece, into.device)
        wide = wide if scale is None else wide * _like(scale, wide)
        own.copy_(wide if stream is None else wide @ _like(stream, wide))


def _turn_entrance(stream: torch.Tensor | None, original: torch.Tensor, into: torch.Tensor) -> None:
    """Write the turned weight or bias of a layer that writes into the stream."""
    wide = _wide(original, into.device)
    into.copy_(wide if stream is None else _like(stream, wide).T @ wide)


def _turn_norm_bias(
    scale: torch.Tensor, stream: torch.Tensor | None, original: torch.Tensor, into: torch.Tensor
) -> None:
    """Write the bias of a norm whose scale is folded: what reads it makes of it what it made of the original."""
    _turn_table(1 / scale, stream, original[None], into[None])


def _neutralise(norm: nn.Module, _original: torch.Tensor, into: torch.Tensor) -> None:
    into.fill_(neutral_value(norm))


def _wide(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy of a tensor in the widest type."""
    return tensor.detach().to(device, wide_dtype(device), copy=True)


def _unless_identity(rotation: torch.Tensor | None) -> torch.Tensor | None:
    """Return a rotation of shape (..., n, n), None if it changes nothing."""
    if rotation is None:
        return None
    identity = torch.eye(rotation.shape[-1], dtype=rotation.dtype, device=rotation.device)
    return None if torch.equal(rotation, identity.expand_as(rotation)) else rotation


def turn_columns(weight: torch.Tensor, heads: torch.Tensor, layout: Heads) -> torch.Tensor:
    """Return a matrix that reads heads' values, shape (out, in), for rotated values."""
    turned = _like(heads, weight).repeat_interleave(layout.group, dim=0)
    split = weight.unflatten(1, (-1, layout.size)).transpose(0, 1)
    return (split @ turned).transpose(0, 1).flatten(1)


def _turn_rows(values: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
    """Return rows that write heads' values, shape (heads * size, in), rotated."""
    count, size = heads.shape[:2]
    return (_like(heads, values).transpose(1, 2) @ values.unflatten(0, (count, size))).flatten(0, 1)


def _like(rotation: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return rotation.to(weight.device, weight.dtype)
