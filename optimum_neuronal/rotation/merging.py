"""Merges rotations into the weights of a model, and restores the weights.

With an orthogonal R1 for the residual stream (x' = x R1) and an orthogonal R2 for each key-value head, the model
computes the same function: embeddings E become E R1; weights that read the stream become W R1, after their norm's
scale is folded into them; weights that write into it become R1^T W; rows of values become R2^T W, and the weights that
read them W R2.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..blocks.statistics import wide_dtype
from ..compat import hf_private
from ..compat.hf_private import set_config
from .rotated_weights import Heads, RotatedBlock, RotatedWeights, bias_of


ROWS = 4096  # of a vocabulary's matrix that are computed at a time


@dataclass(frozen=True)
class Rotations:
    """Orthogonal rotations of a model."""

    stream: torch.Tensor | None  # R1, shape (hidden, hidden); None if the stream is not rotated
    heads: Sequence[torch.Tensor]  # R2 of every block, shape (key-value heads, size, size)

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {} if self.stream is None else {"stream": self.stream}
        return found | {f"heads-{index}": rotation for index, rotation in enumerate(self.heads)}

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, torch.Tensor]) -> "Rotations":
        count = len(tensors) - ("stream" in tensors)
        return cls(tensors.get("stream"), [tensors[f"heads-{index}"] for index in range(count)])

    @classmethod
    def identity(cls, rotated: RotatedWeights) -> "Rotations":
        stream = torch.eye(rotated.decoder.config.hidden_size, dtype=torch.float64) if rotated.rotates_stream else None
        heads = [torch.eye(p.heads.size, dtype=torch.float64).repeat(p.heads.count, 1, 1) for p in rotated.blocks]
        return cls(stream, heads)


class Originals:
    """Copies, in CPU memory, of the weights of a model that a rotation will change."""

    def __init__(self, rotated: RotatedWeights):
        self.rotated, self._unties, self._config = rotated, rotated.unties, rotated.model.config
        self._head = rotated.model.get_output_embeddings().weight
        self._copies = {p: p.detach().to("cpu", copy=True) for p in rotated.parameters()}
        self._offset = rotated.decoder.architecture.norm_offset

    def merge(self, rotations: Rotations) -> None:
        """Set the model's weights to the rotated originals, fold the norms and untie the head."""
        rotated, stream = self.rotated, unless_identity(rotations.stream)
        head, embeddings = rotated.model.get_output_embeddings(), rotated.model.get_input_embeddings()
        if rotated.unties:
            head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=head.weight.requires_grad)
            config = copy.copy(self._config)
            config.tie_word_embeddings = False
            _set_config(rotated.model, config)
        with torch.no_grad():
            for own, heads in zip(rotated.blocks, map(unless_identity, rotations.heads)):
                self._merge_block(own, stream, heads)
            if rotated.rotates_stream:
                turn_table(embeddings.weight, self._copies[embeddings.weight], None, stream)
                turn_table(head.weight, self._copies[self._head], self._scale(rotated.final_norm), stream)
            for norm in rotated.norms:
                norm.weight.fill_(1 - self._offset)

    def restore(self) -> None:
        """Restore all weights bit by bit, and tie the head again."""
        if self._unties:
            self.rotated.model.get_output_embeddings().weight = self._head
            _set_config(self.rotated.model, self._config)
        with torch.no_grad():
            for parameter, original in self._copies.items():
                parameter.copy_(original)

    def _scale(self, norm: nn.Module) -> torch.Tensor:
        """Return the factor by which a norm scales each feature, shape (hidden,)."""
        weight = self._copies[norm.weight]
        return widened(weight, weight.device) + self._offset

    def _merge_block(self, own: RotatedBlock, stream: torch.Tensor | None, heads: torch.Tensor | None) -> None:
        scales = {reader: self._scale(norm) for norm, readers in own.folds for reader in readers}
        for projection in own.projections:
            weight = widened(projection.view(self._copies[projection.owner]), projection.owner.device)
            if projection in scales:
                weight = weight * like(scales[projection], weight)
                weight = weight if stream is None else weight @ like(stream, weight)
            if heads is not None and projection is own.heads.reader:
                weight = turn_columns(weight, heads, own.heads)
            written = [(projection.weight, weight)]
            if (bias := bias_of(projection)) is not None:
                written.append((bias, widened(self._copies[bias], bias.device)[:, None]))
            for into, values in written:
                if heads is not None and projection is own.heads.writer:
                    values[own.heads.rows] = turn_rows(values[own.heads.rows], heads)
                if stream is not None and projection in own.writers:
                    values = like(stream, values).T @ values
                into.copy_(values.view(into.shape))


def _set_config(model: PreTrainedModel, config: PreTrainedConfig) -> None:
    set_config(model, config)
    hf_private.refresh_tied_weights(model)


def turn_table(
    into: torch.Tensor, original: torch.Tensor, scale: torch.Tensor | None, stream: torch.Tensor | None
) -> None:
    """Write the rotated embeddings or head, shape (vocabulary, hidden), in pieces: in float64 they take gigabytes."""
    for own, piece in zip(into.split(ROWS), original.split(ROWS)):
        wide = widened(piece, into.device)
        wide = wide if scale is None else wide * like(scale, wide)
        own.copy_(wide if stream is None else wide @ like(stream, wide))


def turn_columns(weight: torch.Tensor, heads: torch.Tensor, layout: Heads) -> torch.Tensor:
    """Return the weight, shape (out, in), that reads rotated values."""
    turned = like(heads, weight).repeat_interleave(layout.group, dim=0)
    split = weight.unflatten(1, (-1, layout.size)).transpose(0, 1)
    return (split @ turned).transpose(0, 1).flatten(1)


def turn_rows(values: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
    """Return rotated rows of values, shape (heads * size, in)."""
    count, size = heads.shape[:2]
    return (like(heads, values).transpose(1, 2) @ values.unflatten(0, (count, size))).flatten(0, 1)


def unless_identity(rotation: torch.Tensor | None) -> torch.Tensor | None:
    """Return a rotation of shape (..., n, n), or None if it is the identity, which must not change a bit."""
    if rotation is None:
        return None
    identity = torch.eye(rotation.shape[-1], dtype=rotation.dtype, device=rotation.device)
    return None if torch.equal(rotation, identity.expand_as(rotation)) else rotation


def widened(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy of a tensor in the widest type of a device."""
    return tensor.detach().to(device, wide_dtype(device), copy=True)


def like(rotation: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return rotation.to(weight.device, weight.dtype)
