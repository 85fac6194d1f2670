"""What a projection receives in the sparse model, side by side with what it receives in the dense one."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from ..decoder.projections import Block, Projection
from ..decoder.trial import Prepared
from ..metrics.statistics import Hessian, Norms, SquaredNorms
from .calls import Call, restore_shared, to_device
from .runner import BlockRunner
from .streams import Stream


class _Reached(Exception):
    """The module that is watched has been called: the rest of the block need not run."""


def stages(runner: BlockRunner, block: Block, stream: Stream, calls: Sequence[Call]) -> list[list[Projection]]:
    """The pruned projections of a block by when they run: together are those with the same input.

    The same projections of all experts run in one stage.

    Args:
        runner ([`BlockRunner`]): runs the block on one batch, to see.
        block ([`Block`]), stream ([`Stream`]), calls (`Sequence[Call]`): what to run on what.
    """
    norms = runner.inputs_of(block, Stream(stream.batches[:1]), calls[:1], SquaredNorms)
    places: dict[SquaredNorms | str, int] = {}
    found: list[list[Projection]] = []
    for name, statistic in norms.items():
        projection = block.projections.get(name)
        if projection is None or not projection.pruned:
            continue
        keys = [statistic] if projection.group is None else [statistic, projection.group]
        place = next((places[key] for key in keys if key in places), len(found))
        if place == len(found):
            found.append([])
        places.update(dict.fromkeys(keys, place))
        found[place].append(projection)
    return found


def stage_inputs(
    runner: BlockRunner,
    block: Block,
    stage: Sequence[Projection],
    sparse: Stream,
    dense: Stream,
    calls: Sequence[Call],
    solved: Prepared,
) -> Norms:
    """Inputs of the projections of a stage behind those that are sparse already, with the dense model's beside them.

    An expert does not receive the same tokens in both models, so of experts only the sparse model's are told.

    Args:
        runner ([`BlockRunner`]): counts the runs.
        block ([`Block`]): with its dense weights.
        stage (`Sequence[Projection]`): from [`stages`].
        sparse, dense ([`Stream`]): hidden states in front of the block, in both models.
        calls (`Sequence[Call]`): the block's calls, one per batch.
        solved ([`Prepared`]): the sparse weights of the stages before.

    Returns:
        `dict[str, Hessian]`: projection name -> statistic, the same for all that share the input.
    """
    if stage[0].expert is not None:
        with solved.in_place():
            return runner.replay(block, sparse, calls, Hessian)[1]
    statistic, module = Hessian(), stage[0].module
    runner.block_forwards += sparse.sequences  # two, which end halfway on average
    for own, other, call in zip(sparse, dense, calls):
        expected = _inputs(block, module, other, call)
        with solved.in_place():
            received = _inputs(block, module, own, call)
        statistic.update_pair(received, expected, len(own))
    return dict.fromkeys((p.name for p in stage), statistic)


def _inputs(block: Block, module: nn.Module, states: torch.Tensor, call: Call) -> torch.Tensor:
    """What a module of a block receives for one batch."""
    restore_shared(states, call)
    states = to_device(states, next(block.module.parameters()).device)
    received: list[torch.Tensor] = []
    with _stopped_at(module, received):
        block.module(states, *call.args, **call.kwargs)
    return received[0]


@contextmanager
def _stopped_at(module: nn.Module, received: list[torch.Tensor]) -> Iterator[None]:
    def stop(_module, args: Iterable[torch.Tensor]) -> None:
        received.append(next(iter(args)))
        raise _Reached

    handle = module.register_forward_pre_hook(stop)
    try:
        yield
    except _Reached:
        pass
    finally:
        handle.remove()
