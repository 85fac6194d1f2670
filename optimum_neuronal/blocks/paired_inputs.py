"""Inputs of a projection in the sparse model, side by side with its inputs in the dense one.

A block runs up to each of its projections in turn, which would repeat most of the work, so the outputs of its children
are kept, batch by batch, as long as they do not change.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property

import torch
from torch import nn

from ..model.projections import Block, Projection, TrialWeights
from .block_inputs import Call, Stream, replaced_forward, restore_shared, shared_containers, to_device
from .runner import BlockRunner
from .statistics import Hessian, Norms, SquaredNorms


class _Reached(Exception):
    """The watched module has been called: the rest of the block need not run."""


def stages(runner: BlockRunner, block: Block, stream: Stream, calls: Sequence[Call]) -> list[list[Projection]]:
    """Return the pruned projections of a block in the order in which they run.

    Projections with the same input are in one stage, and so are the same projections of all experts.
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

    The output of a child is kept once all weights in it are decided, in the dense model from the first run on. So all
    runs together take about half a run of the block in each model.
    """

    def __init__(self, runner: BlockRunner, block: Block, sparse: Stream, dense: Stream, calls: Sequence[Call]):
        self.runner, self.block, self.streams, self.calls = runner, block, (sparse, dense), calls
        self._kept: list[ChildOutputs] = []
        self._seen: set[nn.Parameter] = set()

    @cached_property
    def stages(self) -> list[list[Projection]]:
        """The stages of the block. Read them before [`PairedRuns.inputs`]: this runs a batch."""
        with children_called_once(self.block, self.calls) as children:
            found = stages(self.runner, self.block, self.streams[1], self.calls)
        device = None if self.runner.max_hidden_bytes is None else torch.device("cpu")
        self._kept = [ChildOutputs(self.block, children, len(self.calls), device) for _ in self.streams]
        return found

    def inputs(self, stage: Sequence[Projection], solved: TrialWeights) -> Norms:
        """Return the inputs of the next stage with sparse weights before it, and the dense model's inputs beside them.

        An expert receives other tokens in the dense model, so experts get the sparse model's inputs only.
        """
        (sparse, dense), (own_kept, other_kept) = self.streams, self._kept
        self._seen |= {p.owner for p in stage}
        own_kept.begin(solved.tensors)
        if stage[0].expert is not None:
            with solved.in_place(), own_kept.in_place():
                return self.runner.replay(self.block, sparse, self.calls, Hessian)[1]
        other_kept.begin(self._seen)
        statistic, module = Hessian(), stage[0].module
        child = other_kept.noted(module)
        self.runner.block_forwards += sparse.sequences // 2  # of both together, see above
        for own, other, call in zip(sparse, dense, self.calls):
            with other_kept.in_place():
                expected = _inputs(self.block, module, other, call, child)
            with solved.in_place(), own_kept.in_place():
                received = _inputs(self.block, module, own, call)
            statistic.update_pair(received, expected, len(own))
        return dict.fromkeys((p.name for p in stage), statistic)

    def output(self, index: int) -> Stream:
        """Return the block's output in one of the models, 0 being the sparse one, with its current weights.

        The weights of earlier stages must be those that [`PairedRuns.inputs`] was given. Kept outputs are dropped.
        """
        if not self._kept:
            return self.runner.output(self.block, self.streams[index], self.calls)
        kept = self._kept[index]
        kept.begin(None)
        with kept.in_place():
            found = self.runner.output(self.block, self.streams[index], self.calls)
        kept.forget()
        return found


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

    handles = [module.register_forward_pre_hook(receive)]
    if child is not None:
        handles.append(child.register_forward_hook(stop))
    try:
        block.module(states, *call.args, **call.kwargs)
    except _Reached:
        pass
    finally:
        for handle in handles:
            handle.remove()
    return received[0]


class _Child:
    """A child of a block with its outputs by batch: it is noting them or, later, returning known ones."""

    def __init__(self, module: nn.Module, owners: set[nn.Parameter]):
        self.module, self.owners = module, owners
        self.outputs: list[tuple[object, list[int]]] = []  # output, and its tensors' versions
        self.noting, self.known, self.calls = False, False, 0


class ChildOutputs:
    """Outputs of the children of a block that hold projections. Each run is of all batches, in order."""

    def __init__(
        self, block: Block, children: Collection[nn.Module], batches: int, device: torch.device | None = None
    ):
        self.batches, self.device, self._children = batches, device, []
        for child in children:
            inside = set(child.modules())
            self._children.append(_Child(child, {p.owner for p in block.pruned if p.module in inside}))

    def begin(self, decided: Collection[nn.Parameter] | None) -> None:
        """Begin a run. Note outputs of children whose pruned weights are all decided; None: of none."""
        for child in self._children:
            child.known = child.known or (child.noting and len(child.outputs) == self.batches)
            child.noting = not child.known and decided is not None and child.owners <= set(decided)
            child.calls = 0
            if not child.known:
                child.outputs = []

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let children return known outputs, or note new ones, while the context lasts."""
        with ExitStack() as stack:
            for child in self._children:
                if child.known or child.noting:
                    stack.enter_context(replaced_forward(child.module, self._forward(child)))
            yield

    def noted(self, module: nn.Module) -> nn.Module | None:
        """Return the child around a module, if its outputs are being noted."""
        return next((c.module for c in self._children if c.noting and module in set(c.module.modules())), None)

    def forget(self) -> None:
        self._children = []

    def _forward(self, child: _Child) -> Callable:
        original = child.module.forward

        def forward(*args, **kwargs):
            number, child.calls = child.calls, child.calls + 1
            if child.known:
                output, versions = child.outputs[number]
                if versions == _versions(output):  # otherwise the block has changed it in place
                    tensors = (v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor))
                    return output if self.device is None else _moved(output, next(tensors).device)
            output = original(*args, **kwargs)
            if child.noting and all(v is None or isinstance(v, torch.Tensor) for v in _listed(output)):
                kept = output if self.device is None else _moved(output, self.device)
                child.outputs.append((kept, _versions(kept)))
            return output

        return forward


@contextmanager
def children_called_once(block: Block, calls: Sequence[Call]) -> Iterator[list[nn.Module]]:
    """Watch a block during one run. Afterwards the yielded list has the children whose outputs may be kept.

    Such a child is called once, and holds projections but no experts. The list stays empty if blocks pass values to
    later ones beside the hidden states, since skipping a child might skip these values.
    """
    found: list[nn.Module] = []
    counts: dict[nn.Module, int] = {}
    modules = {p.module for p in block.projections.values()}
    experts = {p.module for p in block.projections.values() if p.expert is not None}
    inside = {child: modules & set(child.modules()) for child in block.module.children() if child not in modules}
    watched = [child for child, own in inside.items() if own and not own & experts]
    handles = [
        child.register_forward_hook(lambda child, _args, _output: counts.update({child: counts.get(child, 0) + 1}))
        for child in watched
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
    if not any(shared_containers(call) for call in calls):
        found += [child for child in watched if counts.get(child) == 1]


def _listed(output: object) -> list:
    return list(output) if isinstance(output, tuple) else [output]


def _versions(output: object) -> list[int]:
    """Return how often each tensor has been changed in place."""
    return [tensor._version for tensor in _listed(output) if tensor is not None]


def _moved(output: object, device: torch.device) -> object:
    moved = [value if value is None else value.to(device) for value in _listed(output)]
    return tuple(moved) if isinstance(output, tuple) else moved[0]
