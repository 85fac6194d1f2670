"""Captures what a model's blocks are called with, and replays single blocks on it."""

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import nn

from ..decoder.projections import Block, Decoder, Projection
from ..metrics.statistics import SquaredNorms, record_inputs
from .experts import RecordingExperts


@dataclass(frozen=True, eq=False)
class Call:
    """How a block is called for one batch: everything beside the hidden states."""

    args: tuple
    kwargs: dict


@dataclass(eq=False)
class BlockInputs:
    """The first block's hidden states for every batch, and how every block is called.

    Args:
        hidden (`list[Tensor]`): one tensor of shape (batch, tokens, hidden size) per batch.
        calls (`list[list[Call]]`): `calls[i][j]` is how block i is called for batch j.
        final_norm (`nn.Module`, *optional*): what the decoder applies to the last block's output.
    """

    hidden: list[torch.Tensor] = field(default_factory=list)
    calls: list[list[Call]] = field(default_factory=list)
    final_norm: nn.Module | None = None


@contextmanager
def inference(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; every module's own mode is put back."""
    training = [module for module in model.modules() if module.training]
    try:
        model.eval()
        with torch.inference_mode(False), torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def _replaced_forward(module: nn.Module, forward: Callable) -> Iterator[None]:
    before = module.__dict__.get("forward")  # set already where accelerate dispatches the module
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before


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


def capture_inputs(
    decoder: Decoder,
    ids: torch.Tensor,
    batch_size: int,
    device: torch.device,
    attention_mask: torch.Tensor | None = None,
    wrap: Wrap | None = None,
    max_hidden_bytes: int | None = None,
) -> BlockInputs:
    """Runs the decoder once per batch with its blocks passing their hidden states through.

    Args:
        decoder ([`Decoder`]): whose blocks' inputs are wanted. Call it inside [`inference`].
        ids (`Tensor` of int64, shape (sequences, tokens)): token ids.
        batch_size (`int`): sequences per batch.
        device (`torch.device`): where the decoder expects token ids.
        attention_mask (`Tensor` of int64, shape (sequences, tokens), *optional*):
            0 where a token is padding; on the same device.
        wrap (*optional*): from [`output_wrapper`], if it is known already; finding it costs a forward of one token.
        max_hidden_bytes (`int`, *optional*): hidden states beyond this many bytes are kept in CPU memory.

    Returns:
        [`BlockInputs`]: bit-equal to what the blocks receive, since no block has computed anything yet.
    """
    inputs = BlockInputs(calls=[[] for _ in decoder.blocks])
    known: list[torch.Tensor] = []
    batches = ids.split(batch_size)
    if wrap is None:
        wrap = output_wrapper(block_outputs(decoder, decoder.blocks[:1], batches[0][:1, :1].to(device))[0])

    def passthrough(index: int) -> Callable:
        def forward(*args, **kwargs):
            hidden, call = split_hidden(args, kwargs)
            if index == 0:
                _keep_shared(hidden, hidden, call)
                inputs.hidden.append(hidden)
            inputs.calls[index].append(_intern(call, known))
            return wrap(hidden)

        return forward

    with ExitStack() as stack:
        for index, block in enumerate(decoder.blocks):
            stack.enter_context(_replaced_forward(block.module, passthrough(index)))
        stack.enter_context(_watch_final_norm(decoder, inputs))
        for index, batch in enumerate(batches):
            padding = {} if attention_mask is None else {"attention_mask": attention_mask.split(batch_size)[index]}
            decoder.module(input_ids=batch.to(device), use_cache=False, **padding)
            _check_shape(decoder, inputs.hidden[-1], batch)
            if max_hidden_bytes is not None and hidden_bytes([inputs.hidden]) > max_hidden_bytes:
                inputs.hidden[-1] = to_device(inputs.hidden[-1], torch.device("cpu"))
    return inputs


def _check_shape(decoder: Decoder, hidden: torch.Tensor, batch: torch.Tensor) -> None:
    if hidden.shape[:-1] != batch.shape:
        raise ValueError(
            f"The blocks of {type(decoder.module).__name__} receive hidden states of shape {tuple(hidden.shape)} for "
            f"{tuple(batch.shape)} tokens: expected (sequences, tokens, hidden size). This model family is not supported."
        )


def next_token_logits(
    decoder: Decoder, ids: torch.Tensor, hidden: torch.Tensor, wrap: Wrap, device: torch.device | str
) -> torch.Tensor:
    """What the model makes of the last block's output, whatever its head does: norm, scale, cap.

    Args:
        decoder ([`Decoder`]): whose blocks are passed by. Call it inside [`inference`].
        ids (`Tensor` of int64, shape (sequences, tokens)): the token ids that `hidden` comes from.
        hidden (`Tensor`, shape (sequences, tokens, hidden size)): the last block's output.
        wrap: from [`output_wrapper`].
        device (`torch.device`): where the decoder expects token ids.

    Returns:
        `Tensor`: float32, shape (sequences, tokens, vocabulary).

    Raises:
        `ValueError`: the model has no language-model head.
    """
    last = len(decoder.blocks) - 1

    def passing(index: int) -> Callable:
        def forward(*args, **kwargs):
            own = split_hidden(args, kwargs)[0]
            return wrap(to_device(hidden, own.device) if index == last else own)

        return forward

    with ExitStack() as stack:
        for index, block in enumerate(decoder.blocks):
            stack.enter_context(_replaced_forward(block.module, passing(index)))
        logits = getattr(decoder.model(input_ids=ids.to(device), use_cache=False), "logits", None)
    if logits is None:
        raise ValueError(
            f"{type(decoder.model).__name__} has no language-model head: load it with AutoModelForCausalLM."
        )
    return logits.float()


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


def block_outputs(decoder: Decoder, blocks: Sequence[Block], ids: torch.Tensor) -> list:
    """What blocks return in the decoder's own forward on token ids of shape (sequences, tokens)."""
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


def output_wrapper(output) -> Wrap:
    """How a block's output is made of hidden states, told from one output: some families return a tuple."""
    rest = output[1:] if isinstance(output, tuple) else None
    return lambda hidden: hidden if rest is None else (hidden, *rest)


def _intern(call: Call, known: list[torch.Tensor]) -> Call:
    """Keeps one copy of equal tensors: masks and position embeddings repeat from batch to batch."""

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
    """Finds the module that reads the last block's output: with the blocks passing through, their first input."""
    inside = {id(module) for block in decoder.blocks for module in block.module.modules()}

    def observe(module, args):
        called_all = len(inputs.calls[-1]) == len(inputs.hidden)
        if args and inputs.hidden and called_all and args[0] is inputs.hidden[-1] and inputs.final_norm is None:
            inputs.final_norm = module

    handles = [
        module.register_forward_pre_hook(observe)
        for module in decoder.module.modules()
        if id(module) not in inside and not isinstance(module, nn.Dropout)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def replay(
    block: Block,
    hidden: Sequence[torch.Tensor],
    calls: Sequence[Call],
    record: type[SquaredNorms] | None = SquaredNorms,
    skipped: Sequence[Projection] = (),
) -> tuple[list[torch.Tensor], dict[str, SquaredNorms]]:
    """Runs one block on the hidden states of every batch.

    Args:
        block ([`Block`]): runs with the weights that it has at the moment.
        hidden (`Sequence[Tensor]`): one tensor of shape (batch, tokens, hidden size) per batch.
        calls (`Sequence[Call]`): the block's calls, one per batch.
        record (`type[SquaredNorms]`, *optional*): what to gather of its projections' inputs; None gathers nothing.
        skipped (`Sequence[Projection]`):
            Projections that only feed the block's output, for a caller who does not need it: they return zeros.

    Returns:
        `tuple`: the outputs, one tensor per batch, and the norms by projection name.
    """
    outputs, recorded = [], {}
    with ExitStack() as stack:
        for projection in skipped:
            if projection.expert is None:
                stack.enter_context(_replaced_forward(projection.module, _zeros(projection.shape[0])))
        device = next(block.module.parameters()).device
        for states, call in zip(hidden, calls):
            _restore_shared(states, call)
            states = to_device(states, device)
            with _recording(block, recorded, states.shape[:2], record, skipped) if record else nullcontext():
                outputs.append(first_output(block.module(states, *call.args, **call.kwargs)))
            _keep_shared(outputs[-1], states, call)
    return outputs, recorded


def _mappings(call: Call) -> list[MutableMapping]:
    """Containers through which blocks hand values to later ones: keys and values, where some blocks share them."""
    return [value for value in call.kwargs.values() if isinstance(value, MutableMapping)]


def _keep_shared(output: torch.Tensor, hidden: torch.Tensor, call: Call) -> None:
    """Notes with a block's output what its containers hold, since every stream of hidden states needs its own."""
    contents = {id(mapping): dict(mapping) for mapping in _mappings(call)}
    output.shared_contents = {**getattr(hidden, "shared_contents", {}), **contents}


def _restore_shared(hidden: torch.Tensor, call: Call) -> None:
    """Puts into a block's containers what the blocks before it wrote for these hidden states."""
    contents = getattr(hidden, "shared_contents", {})
    for mapping in _mappings(call):
        if id(mapping) in contents:
            mapping.clear()
            mapping.update(contents[id(mapping)])


@contextmanager
def _recording(
    block: Block,
    recorded: dict[str, SquaredNorms],
    batch: tuple[int, int],
    statistic: type[SquaredNorms],
    skipped: Sequence[Projection],
) -> Iterator[None]:
    """While the context lasts, the inputs of all projections are measured, and those of every mixture of experts."""
    watched = {name: p.module for name, p in block.projections.items() if p.expert is None}
    watched |= {experts.name: experts.module for experts in block.experts if not experts.stacked}
    with ExitStack() as stack:
        stack.enter_context(record_inputs(watched, recorded, batch, statistic))
        for experts in block.experts:
            own = [p for p in block.projections.values() if p.module is experts.module]
            if any(p.pruned for p in own):
                forward = RecordingExperts(experts, own, recorded, batch[0], statistic, skipped).forward
                stack.enter_context(_replaced_forward(experts.module, forward))
        yield


def _zeros(features: int) -> Callable:
    return lambda inputs: inputs.new_zeros(*inputs.shape[:-1], features)
