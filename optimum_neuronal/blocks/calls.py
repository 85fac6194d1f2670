"""Calls of blocks, and the streams of hidden states that runs carry from block to block."""

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, eq=False)
class Call:
    """The arguments of a block for one batch, without the hidden states."""

    args: tuple
    kwargs: dict


def split_hidden(args: tuple, kwargs: dict) -> tuple[torch.Tensor, Call]:
    if args:
        return args[0], Call(args[1:], dict(kwargs))
    rest = {key: value for key, value in kwargs.items() if key != "hidden_states"}
    return kwargs["hidden_states"], Call((), rest)


def first_output(output) -> torch.Tensor:
    """Return the hidden states in a block's output, which is a tuple in some families."""
    return output[0] if isinstance(output, tuple) else output


Wrap = Callable[[torch.Tensor], object]  # hidden states -> a block's output with them


def output_wrapper(output) -> Wrap:
    """Return a function that puts hidden states into the form of a block's output."""
    rest = output[1:] if isinstance(output, tuple) else None
    return lambda hidden: hidden if rest is None else (hidden, *rest)


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable) -> Iterator[None]:
    before = module.__dict__.get("forward")  # set already where accelerate dispatches the module
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before


def to_device(hidden: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return hidden states on another device, with their `shared_contents`."""
    if hidden.device == device:
        return hidden
    moved = hidden.to(device)
    if hasattr(hidden, "shared_contents"):
        moved.shared_contents = hidden.shared_contents
    return moved


def keep_shared(output: torch.Tensor, hidden: torch.Tensor, call: Call) -> None:
    """Note the contents of a block's containers with its output, since every stream needs its own."""
    contents = {id(mapping): dict(mapping) for mapping in shared_containers(call)}
    output.shared_contents = {**getattr(hidden, "shared_contents", {}), **contents}


def restore_shared(hidden: torch.Tensor, call: Call) -> None:
    """Fill a block's containers with what the blocks before it wrote for these hidden states."""
    contents = getattr(hidden, "shared_contents", {})
    for mapping in shared_containers(call):
        if id(mapping) in contents:
            mapping.clear()
            mapping.update(contents[id(mapping)])


def shared_containers(call: Call) -> list[MutableMapping]:
    """Return the containers through which blocks hand keys and values to later blocks, in families that share them."""
    return [value for value in call.kwargs.values() if isinstance(value, MutableMapping)]


@dataclass(frozen=True, eq=False)
class Stream:
    """Hidden states of all batches at one place in the model, for one candidate. Streams are compared by identity."""

    batches: Sequence[torch.Tensor]  # each of shape (batch, tokens, hidden size)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.batches)

    @property
    def sequences(self) -> int:
        return sum(len(states) for states in self.batches)


Streams = list["Stream | None"]  # None: the candidate was abandoned


def hidden_bytes(streams: Streams) -> int:
    """Return the bytes of all hidden states. A tensor in several streams counts once."""
    tensors = {id(states): states for stream in streams if stream is not None for states in stream}
    return sum(states.numel() * states.element_size() for states in tensors.values())


def on_cpu(streams: Streams) -> Streams:
    """Return the streams in CPU memory. The same stream stays one object."""
    moved: dict[torch.Tensor, torch.Tensor] = {}  # by identity
    found: dict[Stream, Stream] = {}
    for stream in streams:
        if stream is not None and stream not in found:
            for states in stream:
                if states not in moved:
                    moved[states] = to_device(states, torch.device("cpu"))
            found[stream] = Stream([moved[states] for states in stream])
    return [None if stream is None else found[stream] for stream in streams]


def grouped(streams: Streams, shared: bool) -> list[list[int]]:
    """Return the indices of the same streams in groups, or of all in one group if `shared`."""
    groups: dict[Stream | None, list[int]] = {}
    for index, stream in enumerate(streams):
        if stream is not None:
            groups.setdefault(None if shared else stream, []).append(index)
    return list(groups.values())
