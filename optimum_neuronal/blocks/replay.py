"""Runs one block on captured hidden states, and records the inputs of its projections."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext

import torch

from ..model.experts import RecordingExperts
from ..model.projections import Block, Projection
from .calls import Call, first_output, keep_shared, replaced_forward, restore_shared, to_device
from .statistics import SquaredNorms, record_inputs


def replay(
    block: Block,
    hidden: Sequence[torch.Tensor],
    calls: Sequence[Call],
    record: type[SquaredNorms] | None = SquaredNorms,
    skipped: Sequence[Projection] = (),
) -> tuple[list[torch.Tensor], dict[str, SquaredNorms]]:
    """Run one block on the hidden states of every batch, shape (batch, tokens, hidden size) each.

    Return the outputs by batch, and the statistics of the projections' inputs (class `record`, None for no statistics)
    by name. `skipped` projections, which may only feed the block's output, return zeros.
    """
    outputs, recorded = [], {}
    with ExitStack() as stack:
        for projection in skipped:
            if projection.expert is None:
                stack.enter_context(replaced_forward(projection.module, _zeros(projection.shape[0])))
        device = next(block.module.parameters()).device
        for states, call in zip(hidden, calls):
            restore_shared(states, call)
            states = to_device(states, device)
            with _recording(block, recorded, states.shape[:2], record, skipped) if record else nullcontext():
                outputs.append(first_output(block.module(states, *call.args, **call.kwargs)))
            keep_shared(outputs[-1], states, call)
    return outputs, recorded


@contextmanager
def _recording(
    block: Block,
    recorded: dict[str, SquaredNorms],
    batch: tuple[int, int],
    statistic: type[SquaredNorms],
    skipped: Sequence[Projection],
) -> Iterator[None]:
    watched = {name: p.module for name, p in block.projections.items() if p.expert is None}
    watched |= {experts.name: experts.module for experts in block.experts if not experts.stacked}
    with ExitStack() as stack:
        stack.enter_context(record_inputs(watched, recorded, batch, statistic))
        for experts in block.experts:
            if any(p.module is experts.module for p in block.pruned):
                own = RecordingExperts(experts, block.projections, recorded, batch[0], statistic, skipped)
                stack.enter_context(replaced_forward(experts.module, own.forward))
        yield


def _zeros(features: int) -> Callable:
    return lambda inputs: inputs.new_zeros(*inputs.shape[:-1], features)
