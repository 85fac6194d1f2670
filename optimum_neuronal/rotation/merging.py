"""Merges rotations into the weights of a model, and restores the weights.

With an orthogonal R1 for the residual stream (x' = x R1) and an orthogonal R2 for each key-value head, the model
computes the same function: embeddings E become E R1; weights that read the stream become W R1, after their norm's
scale is folded into them; weights that write into it become R1^T W; rows of values become R2^T W, and the weights that
read them W R2.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..common.machine import deferred_interrupt
from ..compat import hf_private
from ..compat.hf_private import set_config
from .rotated_weights import RotatedBlock, RotatedWeights, bias_of
from .turns import turn_bias, turn_table, turn_weight, unless_identity, widened


@dataclass(frozen=True)
class Rotations:
    """Orthogonal rotations of a model."""

    stream: torch.Tensor | None  # R1, shape (hidden, hidden); None if the stream is not rotated
    heads: Sequence[torch.Tensor]  # R2 of every block, shape (key-value heads, size, size)

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {f"heads-{index}": rotation for index, rotation in enumerate(self.heads)}
        return found if self.stream is None else {"stream": self.stream, **found}

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, torch.Tensor]) -> "Rotations":
        heads = [tensors[f"heads-{index}"] for index in range(sum(name != "stream" for name in tensors))]
        return cls(tensors.get("stream"), heads)

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
        self._untie(head)
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
            turned = turn_weight(projection, own, weight, scales.get(projection), stream, heads)
            projection.weight.copy_(turned)
            if (bias := bias_of(projection)) is not None:
                bias.copy_(turn_bias(projection, own, widened(self._copies[bias], bias.device), stream, heads))

    def _untie(self, head: nn.Module) -> None:
        if self.rotated.unties:
            config = copy.copy(self._config)
            head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=head.weight.requires_grad)
            config.tie_word_embeddings = False
            _set_config(self.rotated.model, config)


@contextmanager
def restored_on_error(originals: Originals, always: bool = False) -> Iterator[None]:
    """Restore a rotated model if an error or an interruption leaves the context, or in any case if `always`."""
    done = False
    try:
        yield
        done = not always
    finally:
        if not done:
            with deferred_interrupt():  # a second Ctrl-C would leave the model half rotated
                originals.restore()


def _set_config(model: PreTrainedModel, config: PreTrainedConfig) -> None:
    set_config(model, config)
    hf_private.find_tied_again(model)
