"""The calls of a model's blocks, and the streams of hidden states that runs carry from block to block."""

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from ..model.projections import Block, Decoder


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
    """Return the hidden states in a block's output, which is a tuple or list in some families."""
    return output[0] if isinstance(output, (tuple, list)) else output


Wrap = Callable[[torch.Tensor], object]  # hidden states -> a block's output with them


def output_wrapper(output) -> Wrap:
    """Return a function that puts hidden states into the form of a block's output."""
    rest = output[1:] if isinstance(output, (tuple, list)) else None
    return lambda hidden: hidden if rest is None else type(output)((hidden, *rest))


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable) -> Iterator[None]:
    before = module.__dict__.get("forward")  # already set where accelerate dispatches the module
    try:
        module.forward = forward  # within `try`: Ctrl-C may come right after it
        yield
    finally:
        if before is None:
            module.__dict__.pop("forward", None)
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
    """Attach a copy of the shared key/value dicts to the output: streams must not see each other's."""
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


def limited(streams: Streams, max_bytes: int | None) -> Streams:
    """Return the streams, in CPU memory if they take more bytes. The same stream counts once and stays one object."""
    cpu, distinct = torch.device("cpu"), set(streams) - {None}
    if max_bytes is None or sum(states.nbytes for stream in distinct for states in stream) <= max_bytes:
        return streams
    moved = {stream: Stream([to_device(states, cpu) for states in stream]) for stream in distinct}
    return [moved.get(stream) for stream in streams]


def same_streams(streams: Streams, shared: bool) -> list[list[int]]:
    """Return the indices of streams in groups of the same stream, or all in one group if `shared`."""
    groups: dict[Stream | None, list[int]] = {}
    for index, stream in enumerate(streams):
        if stream is not None:
            groups.setdefault(None if shared else stream, []).append(index)
    return list(groups.values())


@dataclass(eq=False)
class BlockInputs:
    """The first block's hidden states for every batch, and the calls of every block."""

    hidden: list[torch.Tensor] = field(default_factory=list)  # each of shape (batch, tokens, hidden size)
    calls: list[list[Call]] = field(default_factory=list)  # calls[i][j] is block i's call for batch j
    final_norm: nn.Module | None = None  # applied by the decoder to the last block's output


@contextmanager
def replaced_blocks(decoder: Decoder, forward: Callable) -> Iterator[None]:
    """Let every block call a function instead: `forward(index of the block, *args, **kwargs)`."""
    with ExitStack() as stack:
        for index, block in enumerate(decoder.blocks):
            stack.enter_context(replaced_forward(block.module, partial(forward, index)))
        yield


def reuse_tensors(value: Any, known: list[torch.Tensor]) -> Any:
    """Return an equal tensor from an earlier call, if there is one: masks and positions repeat from batch to batch."""
    if type(value) is tuple:
        return tuple(map(partial(reuse_tensors, known=known), value))
    if not isinstance(value, torch.Tensor):
        return value
    for earlier in known:
        alike = (earlier.dtype, earlier.device) == (value.dtype, value.device)
        if earlier is value or alike and torch.equal(earlier, value):
            return earlier
    known.append(value)
    return value


@contextmanager
def watch_final_norm(decoder: Decoder, inputs: BlockInputs) -> Iterator[None]:
    """Find the module that reads the last block's output. A pooler, whose output has another shape, does not count."""
    inside = {module for block in decoder.blocks for module in block.module.modules()}

    def observe(module, args, output):
        called_all = len(inputs.calls[-1]) == len(inputs.hidden)
        reads_it = args and inputs.hidden and called_all and args[0] is inputs.hidden[-1]
        if reads_it and inputs.final_norm is None and getattr(output, "shape", None) == args[0].shape:
            inputs.final_norm = module

    with ExitStack() as stack:
        for module in decoder.module.modules():
            if module not in inside and not isinstance(module, nn.Dropout):
                stack.enter_context(module.register_forward_hook(observe))
        yield


def called_blocks(decoder: Decoder, device: torch.device) -> tuple[list[Block], Wrap]:
    """Return the blocks that the decoder calls for text, and [`output_wrapper`] of them. Call it inside [`inference`].

    Text skips some blocks of multimodal models, such as cross-attention to images. Only the first block that is called
    computes.
    """
    called: set[int] = set()
    wraps: list[Wrap] = []
    own = [block.module.forward for block in decoder.blocks]

    def forward(index: int, *args, **kwargs):
        called.add(index)
        if not wraps:
            wraps.append(output_wrapper(own[index](*args, **kwargs)))
        return wraps[0](split_hidden(args, kwargs)[0])

    with replaced_blocks(decoder, forward):
        decoder.module(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=device), use_cache=False)
    if not called:
        raise ValueError(
            f"{type(decoder.module).__name__} calls none of its blocks ({decoder.blocks[0].name}, ...) for text: this model "
            "family is not supported."
        )
    return [decoder.blocks[index] for index in sorted(called)], wraps[0]
