"""Streams of hidden states, which runs over the blocks carry from one block to the next."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from .calls import hidden_bytes, to_device


@dataclass(frozen=True, eq=False)
class Stream:
    """Hidden states of all batches at one place in the model, as some candidate's blocks have put them out.

    Two streams are the same only if they are the same object: then all that follows from them is the same too, and is
    done once.

    Args:
        batches (`Sequence[Tensor]`): one tensor of shape (batch, tokens, hidden size) per batch.
    """

    batches: Sequence[torch.Tensor]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.batches)

    @property
    def sequences(self) -> int:
        """How many sequences it is of."""
        return sum(len(states) for states in self.batches)


Streams = list["Stream | None"]  # None: of a candidate that was abandoned


def streams_bytes(streams: Streams) -> int:
    """Bytes of all hidden states; those that several streams share count once."""
    return hidden_bytes([stream.batches for stream in streams if stream is not None])


def on_cpu(streams: Streams) -> Streams:
    """Streams of these hidden states in CPU memory; those that were the same stay so."""
    moved: dict[torch.Tensor, torch.Tensor] = {}  # tensors are told apart by identity
    found: dict[Stream, Stream] = {}
    for stream in streams:
        if stream is not None and stream not in found:
            for states in stream:
                if states not in moved:
                    moved[states] = to_device(states, torch.device("cpu"))
            found[stream] = Stream([moved[states] for states in stream])
    return [None if stream is None else found[stream] for stream in streams]


def grouped(streams: Streams, shared: bool) -> list[list[int]]:
    """Indices of streams that share what a dense block makes of them: those that are the same, or all if `shared`.

    Streams that were abandoned are in no group.
    """
    groups: dict[Stream | None, list[int]] = {}
    for index, stream in enumerate(streams):
        if stream is not None:
            groups.setdefault(None if shared else stream, []).append(index)
    return list(groups.values())
