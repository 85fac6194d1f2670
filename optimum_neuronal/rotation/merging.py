"""Merges rotations into the weights of a model, and puts the weights back.

With an orthogonal R1 for the residual stream (x' = x R1) and an orthogonal R2 for each key-value head the model computes
the same function: embeddings E R1; what reads the stream W R1, behind norms whose weights are folded into it; what writes
into it R1^T W; values R2^T W, and what reads them W R2. Biases of norms stay there, divided by the weights and rotated.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..blocks.offload import TurnedWeights
from ..common.interrupts import deferred_interrupt
from ..compat import accelerate, hf_private
from ..model.set_config import set_config
from .parts import RotatedParts
from .turns import find_turns


@dataclass(frozen=True)
class Rotations:
    """Rotations of a model.

    Args:
        stream (`Tensor`, *optional*):
            R1, shape (hidden, hidden), orthogonal; it keeps the vector of ones if the parts say so. None: the stream stays.
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
    """The weights that a rotation changes, as they were: copies in CPU memory; offloaded ones stay where they are.

    An offloaded model is rotated whenever it is read, see [`TurnedWeights`].

    Args:
        parts ([`RotatedParts`]): of the model, not rotated yet.
    """

    def __init__(self, parts: RotatedParts):
        self.parts, self._tied, self._config = parts, parts.unties, parts.model.config
        self._head = parts.model.get_output_embeddings().weight
        self._maps = {m: accelerate.weights_map(m) for m, _ in parts.places() if accelerate.is_offloaded(m)}
        in_memory = {getattr(module, name) for module, name in parts.places() if module not in self._maps}
        self._copies = {parameter: parameter.detach().to("cpu", copy=True) for parameter in in_memory}

    def merge(self, rotations: Rotations) -> None:
        """Set the model's weights to the originals, rotated; computed in float64, norms folded. The head is untied."""
        self._untie()
        turns = find_turns(self.parts, rotations.stream, rotations.heads, self._read)
        with torch.no_grad():
            for (module, name), own in turns.items():
                if module not in self._maps:
                    for turn in own:
                        turn(self._read(module, name), getattr(module, name))
        for module in self._maps:
            found = {name: own for (owner, name), own in turns.items() if owner is module}
            source = self._maps[self._source(module)]
            keeps = module in (*self.parts.embeddings, *self._outer)
            accelerate.set_weights_map(module, TurnedWeights(source, found, keeps))

    def restore(self) -> None:
        """Put all weights back, bit by bit; the head is tied again."""
        model = self.parts.model
        if self._tied:
            model.get_output_embeddings().weight = self._head
            _set_config(model, self._config)
        for module, weights in self._maps.items():
            accelerate.set_weights_map(module, weights)
        with torch.no_grad():
            for parameter, copy in self._copies.items():
                parameter.copy_(copy)

    @property
    def _outer(self) -> tuple[nn.Module, nn.Module]:
        """Embeddings and head: large, and read for every batch."""
        return self.parts.model.get_input_embeddings(), self.parts.model.get_output_embeddings()

    def _source(self, module: nn.Module) -> nn.Module:
        """Return the module that holds the original of a module's weight: the embeddings for a head that was tied."""
        embeddings, head = self._outer
        return embeddings if self._tied and module is head else module

    def _read(self, module: nn.Module, name: str) -> torch.Tensor:
        """Return the original of a parameter, where it lives."""
        source = self._source(module)
        return self._maps[source][name] if source in self._maps else self._copies[getattr(source, name)]

    def _untie(self) -> None:
        if self.parts.unties:
            head, own = self.parts.model.get_output_embeddings(), copy.copy(self._config)
            head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=head.weight.requires_grad)
            own.tie_word_embeddings = False
            _set_config(self.parts.model, own)


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


def _set_config(model: PreTrainedModel, config: PreTrainedConfig) -> None:
    """Replace the config of a model, and let its list of tied weights follow."""
    set_config(model, config)
    hf_private.find_tied_again(model)
