"""What a projection receives in the sparse model, side by side with what it receives in the dense one."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from ..model.projections import Block, Projection
from ..model.trial import TrialWeights
from .calls import Call, restore_shared, to_device
from .part_outputs import PartOutputs, children_called_once
from .runner import BlockRunner
from .statistics import Hessian, Norms, SquaredNorms
from .streams import Stream


STAGES = 4  # of most families: queries, keys and values; what joins the heads; the MLP's first; its last


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


class PairedRuns:
    """Runs of one block on all batches, in the sparse and in the dense model, stage after stage.

    What a part of the block puts out is kept as soon as it is decided, in the dense model from the first, so that all
    runs of a stage together take about half a run of the block in each model.

    Args:
        runner ([`BlockRunner`]): counts the runs.
        block ([`Block`]): with its dense weights.
        sparse, dense ([`Stream`]): hidden states in front of the block, in both models.
        calls (`Sequence[Call]`): the block's calls, one per batch.

    Attributes:
        stages (`list[list[Projection]]`): see [`stages`].
    """

    def __init__(self, runner: BlockRunner, block: Block, sparse: Stream, dense: Stream, calls: Sequence[Call]):
        self.runner, self.block, self.streams, self.calls = runner, block, (sparse, dense), calls
        with children_called_once(block, calls) as children:
            self.stages = stages(runner, block, dense, calls)
        device = None if runner.max_hidden_bytes is None else torch.device("cpu")
        self._parts = [PartOutputs(block, children, len(calls), device) for _ in self.streams]
        self._seen: set[nn.Parameter] = set()

    def inputs(self, stage: Sequence[Projection], solved: TrialWeights) -> Norms:
        """Inputs of the projections of a stage behind those that are sparse already, with the dense model's beside them.

        An expert does not receive the same tokens in both models, so of experts only the sparse model's are told.

        Args:
            stage (`Sequence[Projection]`): the next of `stages`.
            solved ([`TrialWeights`]): the sparse weights of the stages before.

        Returns:
            `dict[str, Hessian]`: projection name -> statistic, the same for all that share the input.
        """
        (sparse, dense), (own_parts, other_parts) = self.streams, self._parts
        self._seen |= {p.owner for p in stage}
        own_parts.begin(solved.tensors)
        if stage[0].expert is not None:
            with solved.in_place(), own_parts.in_place():
                return self.runner.replay(self.block, sparse, self.calls, Hessian)[1]
        other_parts.begin(self._seen)
        statistic, module = Hessian(), stage[0].module
        part = other_parts.noted(module)
        self.runner.block_forwards += sparse.sequences // 2  # of both together; see above
        for own, other, call in zip(sparse, dense, self.calls):
            with other_parts.in_place():
                expected = _inputs(self.block, module, other, call, part)
            with solved.in_place(), own_parts.in_place():
                received = _inputs(self.block, module, own, call)
            statistic.update_pair(received, expected, len(own))
        return dict.fromkeys((p.name for p in stage), statistic)

    def output(self, index: int) -> Stream:
        """What the block puts out in one of the models, 0 being the sparse one, with the weights that it has at the moment.

        Those of the stages that inputs were asked of must be the ones that were told as solved then. What is known of that
        model is let go of.
        """
        parts = self._parts[index]
        parts.begin(None)
        with parts.in_place():
            found = self.runner.output(self.block, self.streams[index], self.calls)
        parts.forget()
        return found


def _inputs(
    block: Block, module: nn.Module, states: torch.Tensor, call: Call, part: nn.Module | None = None
) -> torch.Tensor:
    """What a module of a block receives for one batch; the block runs up to there, or to the end of a part."""
    restore_shared(states, call)
    states = to_device(states, next(block.module.parameters()).device)
    received: list[torch.Tensor] = []
    with _stopped(module, received, part):
        block.module(states, *call.args, **call.kwargs)
    return received[0]


@contextmanager
def _stopped(module: nn.Module, received: list[torch.Tensor], part: nn.Module | None) -> Iterator[None]:
    def receive(_module, args: Iterable[torch.Tensor]) -> None:
        value = next(iter(args))
        received.append(value if part is None else value.clone())  # what comes behind may change it in place
        if part is None:
            raise _Reached

    def stop(*_) -> None:
        raise _Reached

    handles = [module.register_forward_pre_hook(receive)]
    if part is not None:
        handles.append(part.register_forward_hook(stop))
    try:
        yield
    except _Reached:
        pass
    finally:
        for handle in handles:
            handle.remove()
