"""How a block is called: the hidden states that go in, everything beside them, and what comes out."""

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, eq=False)
class Call:
    """How a block is called for one batch: everything beside the hidden states."""

    args: tuple
    kwargs: dict


def split_hidden(args: tuple, kwargs: dict) -> tuple[torch.Tensor, Call]:
    """Tells a block's hidden states from its other arguments."""
    if args:
        return args[0], Call(args[1:], dict(kwargs))
    rest = {key: value for key, value in kwargs.items() if key != "hidden_states"}
    return kwargs["hidden_states"], Call((), rest)


def first_output(output) -> torch.Tensor:
    """The hidden states among a block's outputs: some families return a tuple."""
    return output[0] if isinstance(output, tuple) else output


Wrap = Callable[[torch.Tensor], object]  # hidden states -> what a block returns around them


def output_wrapper(output) -> Wrap:
    """How a block's output is made of hidden states, told from one output: some families return a tuple."""
    rest = output[1:] if isinstance(output, tuple) else None
    return lambda hidden: hidden if rest is None else (hidden, *rest)


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable) -> Iterator[None]:
    """While the context lasts, a module computes something else."""
    before = module.__dict__.get("forward")  # set already where accelerate dispatches the module
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before


def hidden_bytes(streams: Sequence[Sequence[torch.Tensor]]) -> int:
    """Bytes of streams of hidden states; tensors that several streams share count once."""
    tensors = {id(states): states for stream in streams for states in stream}
    return sum(states.numel() * states.element_size() for states in tensors.values())


def to_device(hidden: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Hidden states on another device, with what their blocks share."""
    if hidden.device == device:
        return hidden
    moved = hidden.to(device)
    if hasattr(hidden, "shared_contents"):
        moved.shared_contents = hidden.shared_contents
    return moved


def keep_shared(output: torch.Tensor, hidden: torch.Tensor, call: Call) -> None:
    """Notes with a block's output what its containers hold, since every stream of hidden states needs its own."""
    contents = {id(mapping): dict(mapping) for mapping in shared_containers(call)}
    output.shared_contents = {**getattr(hidden, "shared_contents", {}), **contents}


def restore_shared(hidden: torch.Tensor, call: Call) -> None:
    """Puts into a block's containers what the blocks before it wrote for these hidden states."""
    contents = getattr(hidden, "shared_contents", {})
    for mapping in shared_containers(call):
        if id(mapping) in contents:
            mapping.clear()
            mapping.update(contents[id(mapping)])


def shared_containers(call: Call) -> list[MutableMapping]:
    """Containers through which blocks hand values to later ones: keys and values, where some blocks share them."""
    return [value for value in call.kwargs.values() if isinstance(value, MutableMapping)]
