"""Merges rotations into the weights of a model, and puts the weights back.

With an orthogonal R1 for the residual stream (x' = x R1) and an orthogonal R2 for each key-value head the model computes
the same function: embeddings E R1; what reads the stream W R1, behind norms whose weights are folded into it; what writes
into it R1^T W; values R2^T W, and what reads them W R2.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..compat import transformers as internals
from ..engine.statistics import wide_dtype
from ..model.projections import Projection
from ..model.set_config import set_config
from ..system.interrupts import deferred_interrupt
from .parts import BlockParts, Heads, RotatedParts, bias_of, neutral_value


ROWS = 4096  # of a matrix that are computed at a time


@dataclass(frozen=True)
class Rotations:
    """Rotations of a model.

    Args:
        stream (`Tensor`, *optional*): R1, shape (hidden, hidden), orthogonal. None: the stream stays as it is.
        heads (`Sequence[Tensor]`): for every block R2, shape (key-value heads, size, size), each orthogonal.
    """

    stream: torch.Tensor | None
    heads: Sequence[torch.Tensor]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return them by name, to be recorded."""
        found = {f"heads-{index}": rotation for index, rotation in enumerate(self.heads)}
        return found if self.stream is None else {"stream": self.stream, **found}

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, torch.Tensor]) -> "Rotations":
        """Return the rotations of [`Rotations.tensors`]."""
        heads = [tensors[f"heads-{index}"] for index in range(sum(name != "stream" for name in tensors))]
        return cls(tensors.get("stream"), heads)

    @classmethod
    def identity(cls, parts: RotatedParts) -> "Rotations":
        """Return rotations that change nothing."""
        stream = torch.eye(parts.decoder.config.hidden_size, dtype=torch.float64) if parts.rotates_stream else None
        heads = [torch.eye(p.heads.size, dtype=torch.float64).repeat(p.heads.count, 1, 1) for p in parts.blocks]
        return cls(stream, heads)


class Originals:
    """Copies of all weights that a rotation changes, in CPU memory.

    Args:
        parts ([`RotatedParts`]): of the model, not rotated yet.
    """

    def __init__(self, parts: RotatedParts):
        self.parts, self._tied, self._config = parts, parts.unties, parts.model.config
        self._copies = {parameter: parameter.detach().to("cpu", copy=True) for parameter in parts.parameters()}

    def merge(self, rotations: Rotations) -> None:
        """Set the model's weights to the originals, rotated; computed in float64, norms folded. The head is untied."""
        self._untie()
        parts = self.parts
        with torch.no_grad():
            for own, heads in zip(parts.blocks, rotations.heads):
                self._merge_block(own, rotations.stream, heads)
            if parts.rotates_stream:
                embeddings, head = parts.model.get_input_embeddings(), parts.model.get_output_embeddings()
                self._read(embeddings.weight, None, rotations.stream, self._copies[embeddings.weight])
                copy = self._copies[embeddings.weight if self._tied else head.weight]
                self._read(head.weight, self._scale(parts.final_norm), rotations.stream, copy)
                parts.final_norm.weight.fill_(neutral_value(parts.final_norm))

    def restore(self) -> None:
        """Put all weights back, bit by bit; the head is tied again."""
        model = self.parts.model
        if self._tied:
            model.get_output_embeddings().weight = model.get_input_embeddings().weight
            _set_config(model, self._config)
        with torch.no_grad():
            for parameter, copy in self._copies.items():
                parameter.copy_(copy)

    def _untie(self) -> None:
        if self.parts.unties:
            head, own = self.parts.model.get_output_embeddings(), copy.copy(self._config)
            head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=head.weight.requires_grad)
            own.tie_word_embeddings = False
            _set_config(self.parts.model, own)

    def _merge_block(self, parts: BlockParts, stream: torch.Tensor | None, heads: torch.Tensor) -> None:
        scales = {p: self._scale(norm) for norm, readers in parts.folds for p in readers}
        projections = {*scales, *parts.writers, parts.heads.writer, parts.heads.reader}
        for projection in projections:
            weight, bias = self._wide(projection)
            if projection in scales:
                weight = (weight * scales[projection]) @ _like(stream, weight)
            if projection is parts.heads.writer:
                weight[parts.heads.rows] = _turn_rows(weight[parts.heads.rows], heads)
                if bias is not None:
                    bias[parts.heads.rows] = _turn_rows(bias[parts.heads.rows, None], heads)[:, 0]
            if projection is parts.heads.reader:
                weight = turn_columns(weight, heads, parts.heads)
            if projection in parts.writers:
                weight, bias = _like(stream, weight).T @ weight, bias if bias is None else _like(stream, bias).T @ bias
            projection.weight.copy_(weight)
            if bias is not None:
                bias_of(projection).copy_(bias)
        for norm, _ in parts.folds:
            norm.weight.fill_(neutral_value(norm))

    def _wide(self, projection: Projection) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the original weight of a projection, shape (out, in), and its bias, in the widest type."""
        device, bias = projection.owner.device, bias_of(projection)
        weight = projection.view(self._copies[projection.owner]).to(device, wide_dtype(device), copy=True)
        return weight, None if bias is None else self._copies[bias].to(device, wide_dtype(device), copy=True)

    def _scale(self, norm: nn.Module) -> torch.Tensor:
        """Return the factor by which a norm scales every feature, shape (hidden,)."""
        copy, device = self._copies[norm.weight], norm.weight.device
        return copy.to(device, wide_dtype(device)) + (1 - neutral_value(norm))

    @staticmethod
    def _read(weight: nn.Parameter, scale: torch.Tensor | None, stream: torch.Tensor, original: torch.Tensor) -> None:
        """Set a matrix that reads the stream by pieces: a vocabulary in float64 takes gigabytes."""
        for own, piece in zip(weight.split(ROWS), original.split(ROWS)):
            wide = piece.to(weight.device, wide_dtype(weight.device))
            wide = wide if scale is None else wide * scale.to(wide.device)
            own.copy_(wide @ _like(stream, wide))


@contextmanager
def put_back(originals: Originals, always: bool = False) -> Iterator[None]:
    """Put the weights back if an error or an interruption leaves the context, or always."""
    done = False
    try:
        yield
        done = not always
    finally:
        if not done:
            with deferred_interrupt():  # a second Ctrl-C would leave the model half rotated
                originals.restore()


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


def _set_config(model: PreTrainedModel, config: PreTrainedConfig) -> None:
    """Replace the config of a model, and let its list of tied weights follow."""
    set_config(model, config)
    internals.find_tied_again(model)
