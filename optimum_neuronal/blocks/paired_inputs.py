"""Inputs of a projection in the sparse model, side by side with its inputs in the dense one.

A block runs up to each of its projections in turn, which would repeat most of the work, so the outputs of its children
are kept, batch by batch, as long as they do not change.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property, partial

import torch
from torch import nn

from ..model.projections import Block, Projection, TrialWeights
from .block_inputs import Call, Stream, replaced_forward, restore_shared, shared_containers, to_device
from .runner import BlockRunner
from .statistics import Hessian, Norms, SquaredNorms


class PairedRuns:
    """Runs of one block on all batches, in the sparse and in the dense model, stage after stage.

    The output of a child is kept once all weights in it are decided, in the dense model from the first run on. So all
    runs together take about half a run of the block in each model.
    """

    def __init__(self, runner: BlockRunner, block: Block, sparse: Stream, dense: Stream, calls: Sequence[Call]):
        self.runner, self.block, self.streams, self.calls = runner, block, (sparse, dense), calls
        self._kept: list[list[KeptOutputs]] = [[], []]  # of the sparse and of the dense model
        self._seen: set[nn.Parameter] = set()

    @cached_property
    def stages(self) -> list[list[Projection]]:
        """The pruned projections in the order in which they run. Read them before [`PairedRuns.inputs`].

        Projections with the same input are in one stage, and so are the same projections of all experts.
        """
        counts, children = Counter(), _children_to_keep(self.block, self.calls)
        with ExitStack() as stack:
            for child in children:
                stack.enter_context(child.register_forward_hook(lambda child, *_: counts.update([child])))
            norms = self.runner.inputs_of(self.block, Stream(self.streams[1].batches[:1]), self.calls[:1])
        children = [child for child in children if counts[child] == 1]
        on_cpu, batches = self.runner.max_hidden_bytes is not None, len(self.calls)
        self._kept = [[KeptOutputs(child, self.block, batches, on_cpu) for child in children] for _ in self.streams]

        places: dict[SquaredNorms | str, int] = {}
        found: list[list[Projection]] = []
        for name, statistic in norms.items():
            projection = self.block.projections.get(name)
            if projection is None or not projection.pruned:
                continue
            keys = [statistic] if projection.group is None else [statistic, projection.group]
            place = next((places[key] for key in keys if key in places), len(found))
            if place == len(found):
                found.append([])
            places.update(dict.fromkeys(keys, place))
            found[place].append(projection)
        return found

    def inputs(self, stage: Sequence[Projection], solved: TrialWeights) -> Norms:
        """Return the inputs of the next stage with sparse weights before it, and the dense model's inputs beside them.

        An expert receives other tokens in the dense model, so experts get the sparse model's inputs only.
        """
        (sparse, dense), (own_kept, other_kept) = self.streams, self._kept
        self._seen |= {p.owner for p in stage}
        _begin(own_kept, solved.tensors.keys())
        if stage[0].expert is not None:
            with solved.in_place(), _in_place(own_kept):
                return self.runner.replay(self.block, sparse, self.calls, Hessian)[1]
        _begin(other_kept, self._seen)
        statistic, module = Hessian(), stage[0].module
        noted = next((kept.child for kept in other_kept if kept.noting and module in kept.inside), None)
        self.runner.block_forwards += sparse.sequences // 2  # of both together, see above
        for own, other, call in zip(sparse, dense, self.calls):
            with _in_place(other_kept):
                expected = _inputs(self.block, module, other, call, noted)
            with solved.in_place(), _in_place(own_kept):
                received = _inputs(self.block, module, own, call)
            statistic.update_pair(received, expected, len(own))
        return dict.fromkeys((p.name for p in stage), statistic)

    def output(self, index: int) -> Stream:
        """Return the block's output in one of the models, 0 being the sparse one, with its current weights.

        The weights of earlier stages must be those that [`PairedRuns.inputs`] was given. Kept outputs are dropped.
        """
        kept, self._kept[index] = self._kept[index], []
        _begin(kept)
        with _in_place(kept):
            return self.runner.output(self.block, self.streams[index], self.calls)


class _Reached(Exception):
    """The watched module has been called: the rest of the block need not run."""


def _inputs(
    block: Block, module: nn.Module, states: torch.Tensor, call: Call, child: nn.Module | None = None
) -> torch.Tensor:
    """Return a module's input for one batch. The block runs up to the module, or to the end of a child."""
    restore_shared(states, call)
    states = to_device(states, next(block.module.parameters()).device)
    received: list[torch.Tensor] = []

    def receive(_module, args: tuple[torch.Tensor]) -> None:
        received.append(args[0] if child is None else args[0].clone())  # later modules may change it in place
        if child is None:
            raise _Reached

    def stop(*_) -> None:
        raise _Reached

    with ExitStack() as stack, suppress(_Reached):
        stack.enter_context(module.register_forward_pre_hook(receive))
        if child is not None:
            stack.enter_context(child.register_forward_hook(stop))
        block.module(states, *call.args, **call.kwargs)
    return received[0]


class KeptOutputs:
    """The outputs of a block's child by batch: noted in one run over all batches, returned in later ones."""

    def __init__(self, child: nn.Module, block: Block, batches: int, on_cpu: bool = False):
        self.child, self.inside, self.batches = child, set(child.modules()), batches
        self.owners = {p.owner for p in block.pruned if p.module in self.inside}
        self.device = next(child.parameters()).device
        self.waits_on = torch.device("cpu") if on_cpu else self.device
        self.outputs: list[object] = []  # copies, since the block may change an output in place
        self.noting, self.known, self.calls = False, False, 0

    def forward(self, original: Callable, *args, **kwargs):
        number, self.calls = self.calls, self.calls + 1
        if self.known:
            return _copied(self.outputs[number], self.device)
        output = original(*args, **kwargs)
        if self.noting and all(value is None or isinstance(value, torch.Tensor) for value in _listed(output)):
            self.outputs.append(_copied(output, self.waits_on))
        return output


def _begin(children: Sequence[KeptOutputs], decided: Set[nn.Parameter] | None = None) -> None:
    """Begin a run over all batches. Note outputs of children whose pruned weights are all decided; None: of no child."""
    for kept in children:
        kept.known, kept.calls = len(kept.outputs) == kept.batches, 0
        kept.noting = not kept.known and decided is not None and kept.owners <= decided
        if not kept.known:
            kept.outputs = []


@contextmanager
def _in_place(children: Sequence[KeptOutputs]) -> Iterator[None]:
    """Let children return known outputs, or note new ones, while the context lasts."""
    with ExitStack() as stack:
        for kept in children:
            if kept.known or kept.noting:
                stack.enter_context(replaced_forward(kept.child, partial(kept.forward, kept.child.forward)))
        yield


def _children_to_keep(block: Block, calls: Sequence[Call]) -> list[nn.Module]:
    """Return the children that hold projections but no experts, and no child if skipping one may skip other values.

    Blocks of some families pass values to later ones in containers.
    """
    if any(shared_containers(call) for call in calls):
        return []
    modules = {p.module for p in block.projections.values()}
    experts = {p.module for p in block.projections.values() if p.expert is not None}
    inside = {child: modules & set(child.modules()) for child in block.module.children() if child not in modules}
    return [child for child, own in inside.items() if own and not own & experts]


def _listed(output: object) -> list:
    return list(output) if isinstance(output, tuple) else [output]


def _copied(output: object, device: torch.device) -> object:
    copies = [value if value is None else value.to(device, copy=True) for value in _listed(output)]
    return tuple(copies) if isinstance(output, tuple) else copies[0]
