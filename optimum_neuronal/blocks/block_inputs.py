"""Captures the calls of a model's blocks, and computes logits from the last block's output."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from ..model.projections import Block, Decoder
from .calls import (
    Call,
    Stream,
    Wrap,
    hidden_bytes,
    keep_shared,
    output_wrapper,
    replaced_forward,
    split_hidden,
    to_device,
)


@dataclass(eq=False)
class BlockInputs:
    """The first block's hidden states for every batch, and the calls of every block."""

    hidden: list[torch.Tensor] = field(default_factory=list)  # each of shape (batch, tokens, hidden size)
    calls: list[list[Call]] = field(default_factory=list)  # calls[i][j] is block i's call for batch j
    final_norm: nn.Module | None = None  # applied by the decoder to the last block's output


@contextmanager
def inference(model: nn.Module) -> Iterator[None]:
    """Set evaluation mode without gradients while the context lasts, then restore every module's own mode."""
    training = [module for module in model.modules() if module.training]
    try:
        model.eval()
        with torch.inference_mode(False), torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def capture_inputs(
    decoder: Decoder,
    ids: torch.Tensor,
    batch_size: int,
    device: torch.device,
    wrap: Wrap | None = None,
    max_hidden_bytes: int | None = None,
) -> BlockInputs:
    """Run the decoder once per batch, its blocks passing their hidden states through. Call it inside [`inference`].

    `ids` has shape (sequences, tokens). Hidden states beyond `max_hidden_bytes` are kept in CPU memory. The inputs are
    bit-equal to the model's own, since no block computes anything.
    """
    inputs = BlockInputs(calls=[[] for _ in decoder.blocks])
    known: list[torch.Tensor] = []
    if wrap is None:
        wrap = find_wrapper(decoder, ids, device)

    def passthrough(index: int) -> Callable:
        def forward(*args, **kwargs):
            hidden, call = split_hidden(args, kwargs)
            if index == 0:
                keep_shared(hidden, hidden, call)
                inputs.hidden.append(hidden)
            inputs.calls[index].append(_intern(call, known))
            return wrap(hidden)

        return forward

    with _replaced_blocks(decoder, passthrough), _watch_final_norm(decoder, inputs):
        for batch in ids.split(batch_size):
            decoder.module(input_ids=batch.to(device), use_cache=False)
            if max_hidden_bytes is not None and hidden_bytes([Stream(inputs.hidden)]) > max_hidden_bytes:
                inputs.hidden[-1] = to_device(inputs.hidden[-1], torch.device("cpu"))
    return inputs


@contextmanager
def _replaced_blocks(decoder: Decoder, forward_of: Callable[[int], Callable]) -> Iterator[None]:
    with ExitStack() as stack:
        for index, block in enumerate(decoder.blocks):
            stack.enter_context(replaced_forward(block.module, forward_of(index)))
        yield


def _intern(call: Call, known: list[torch.Tensor]) -> Call:
    """Return a call that shares equal tensors with earlier ones: masks and positions repeat from batch to batch."""

    def shared(value):
        if isinstance(value, torch.Tensor):
            for tensor in known:
                same = tensor is value or (tensor.shape == value.shape and tensor.dtype == value.dtype)
                if same and torch.equal(tensor, value):
                    return tensor
            known.append(value)
        elif isinstance(value, tuple) and type(value) is tuple:
            return tuple(shared(item) for item in value)
        return value

    return Call(shared(call.args), {key: shared(value) for key, value in call.kwargs.items()})


@contextmanager
def _watch_final_norm(decoder: Decoder, inputs: BlockInputs) -> Iterator[None]:
    """Find the module that reads the last block's output. A pooler, whose output has another shape, does not count."""
    inside = {id(module) for block in decoder.blocks for module in block.module.modules()}

    def observe(module, args, output):
        called_all = len(inputs.calls[-1]) == len(inputs.hidden)
        reads_it = args and inputs.hidden and called_all and args[0] is inputs.hidden[-1]
        if reads_it and inputs.final_norm is None and getattr(output, "shape", None) == args[0].shape:
            inputs.final_norm = module

    handles = [
        module.register_forward_hook(observe)
        for module in decoder.module.modules()
        if id(module) not in inside and not isinstance(module, nn.Dropout)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def block_outputs(decoder: Decoder, blocks: Sequence[Block], ids: torch.Tensor) -> list:
    """Return the outputs of blocks in the decoder's own forward on token ids of shape (sequences, tokens)."""
    outputs: dict[int, object] = {}
    handles = [
        block.module.register_forward_hook(lambda _module, _args, output, i=i: outputs.__setitem__(i, output))
        for i, block in enumerate(blocks)
    ]
    try:
        decoder.module(input_ids=ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return [outputs[index] for index in range(len(blocks))]


def find_wrapper(decoder: Decoder, ids: torch.Tensor, device: torch.device | str) -> Wrap:
    """Return the [`output_wrapper`] of a decoder's blocks, found by a forward of the first token."""
    return output_wrapper(block_outputs(decoder, decoder.blocks[:1], ids[:1, :1].to(device))[0])


def next_token_logits(
    decoder: Decoder, ids: torch.Tensor, hidden: torch.Tensor, wrap: Wrap, device: torch.device | str
) -> torch.Tensor:
    """Return the model's logits for the last block's output, inside [`inference`].

    `ids` (int64, shape (sequences, tokens)) and `hidden` (sequences, tokens, hidden size) give float32 of shape
    (sequences, tokens, vocabulary).
    """
    last = len(decoder.blocks) - 1

    def passing(index: int) -> Callable:
        def forward(*args, **kwargs):
            own = split_hidden(args, kwargs)[0]
            return wrap(to_device(hidden, own.device) if index == last else own)

        return forward

    if not decoder.predicts_next_token:
        raise ValueError(f"{type(decoder.model).__name__} has no causal language-model head.")
    with _replaced_blocks(decoder, passing):
        return decoder.model(input_ids=ids.to(device), use_cache=False).logits.float()
