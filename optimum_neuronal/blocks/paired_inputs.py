"""Inputs of a projection in the sparse model, side by side with its inputs in the dense one.

Where a block runs up to one of its projections after the other, most of the work would be to repeat earlier parts. So the
outputs of parts are kept, batch by batch, as long as they do not change.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property

import torch
from torch import nn

from ..model.projections import Block, Projection, TrialWeights
from .calls import Call, Stream, replaced_forward, restore_shared, shared_containers, to_device
from .runner import BlockRunner
from .statistics import Hessian, Norms, SquaredNorms


class _Reached(Exception):
    """The watched module has been called: the rest of the block need not run."""


def stages(runner: BlockRunner, block: Block, stream: Stream, calls: Sequence[Call]) -> list[list[Projection]]:
    """Return the pruned projections of a block in the order in which they run. Projections with one input run together.

    The same projections of all experts run in one stage.

    Args:
        runner ([`BlockRunner`]): runs the block on the first batch.
        block ([`Block`]), stream ([`Stream`]), calls (`Sequence[Call]`): the block and its inputs.
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

    The output of a part of the block is kept as soon as the weights in it are decided, in the dense model from the
    first. So all runs of a stage together take about half a run of the block in each model.

    Args:
        runner ([`BlockRunner`]): counts the runs.
        block ([`Block`]): with its dense weights.
        sparse, dense ([`Stream`]): hidden states in front of the block, in both models.
        calls (`Sequence[Call]`): the block's calls, one per batch.

    """

    def __init__(self, runner: BlockRunner, block: Block, sparse: Stream, dense: Stream, calls: Sequence[Call]):
        self.runner, self.block, self.streams, self.calls = runner, block, (sparse, dense), calls
        self._parts: list[PartOutputs] = []
        self._seen: set[nn.Parameter] = set()

    @cached_property
    def stages(self) -> list[list[Projection]]:
        """The stages of the block, see [`stages`]. Ask for them before their inputs: the first look runs a batch."""
        with children_called_once(self.block, self.calls) as children:
            found = stages(self.runner, self.block, self.streams[1], self.calls)
        device = None if self.runner.max_hidden_bytes is None else torch.device("cpu")
        self._parts = [PartOutputs(self.block, children, len(self.calls), device) for _ in self.streams]
        return found

    def inputs(self, stage: Sequence[Projection], solved: TrialWeights) -> Norms:
        """Return the inputs of the projections of a stage behind the sparse ones, with the dense model's inputs beside them.

        An expert does not receive the same tokens in both models, so experts get the sparse model's inputs alone.

        Args:
            stage (`Sequence[Projection]`): the next of `stages`.
            solved ([`TrialWeights`]): the sparse weights of the stages before.

        Returns:
            `dict[str, Hessian]`: projection name -> statistic, one for each distinct input.
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
        with self.runner.counted(sparse.sequences // 2):  # of both together; see above
            for own, other, call in zip(sparse, dense, self.calls):
                with other_parts.in_place():
                    expected = _inputs(self.block, module, other, call, part)
                with solved.in_place(), own_parts.in_place():
                    received = _inputs(self.block, module, own, call)
                statistic.update_pair(received, expected, len(own))
        return dict.fromkeys((p.name for p in stage), statistic)

    def output(self, index: int) -> Stream:
        """Return the block's output in one of the models, 0 being the sparse one, with its current weights.

        The weights of earlier stages must be the ones that [`PairedRuns.inputs`] was given. The kept outputs are dropped.
        """
        if not self._parts:
            return self.runner.output(self.block, self.streams[index], self.calls)
        parts = self._parts[index]
        parts.begin(None)
        with parts.in_place():
            found = self.runner.output(self.block, self.streams[index], self.calls)
        parts.forget()
        return found


def _inputs(
    block: Block, module: nn.Module, states: torch.Tensor, call: Call, part: nn.Module | None = None
) -> torch.Tensor:
    """Return a module's input for one batch. The block runs up to the module, or to the end of a part."""
    restore_shared(states, call)
    states = to_device(states, next(block.module.parameters()).device)
    received: list[torch.Tensor] = []
    with _stopped(module, received, part):
        block.module(states, *call.args, **call.kwargs)
    return received[0]


@contextmanager
def _stopped(module: nn.Module, received: list[torch.Tensor], part: nn.Module | None) -> Iterator[None]:
    def receive(_module, args: tuple[torch.Tensor]) -> None:
        received.append(args[0] if part is None else args[0].clone())  # later modules may change it in place
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


class _Part:
    """One child of a block with its outputs by batch. It is either noting them or, later, returning known ones."""

    def __init__(self, module: nn.Module, owners: set[nn.Parameter]):
        self.module, self.owners = module, owners
        self.outputs: list[tuple[object, tuple[int, ...]]] = []
        self.noting, self.known, self.calls = False, False, 0


class PartOutputs:
    """Outputs of the children of a block that hold projections, for one stream of hidden states.

    ```python
    parts.begin(decided)
    for batch in batches:
        with parts.in_place():
            block(batch)
    ```

    Args:
        block ([`Block`]): to run.
        children (`Collection[Module]`): from [`children_called_once`].
        batches (`int`): of the stream; every run is of all of them, in order.
        device (`torch.device`, *optional*): where outputs wait. None: where they are made.
    """

    def __init__(
        self, block: Block, children: Collection[nn.Module], batches: int, device: torch.device | None = None
    ):
        self.batches, self.device = batches, device
        self._parts = []
        for child in children:
            inside = set(child.modules())
            owners = {p.owner for p in block.pruned if p.module in inside}
            self._parts.append(_Part(child, owners))

    def begin(self, decided: Collection[nn.Parameter] | None) -> None:
        """Begin a run of all batches. Note outputs of parts whose pruned weights are all decided; None: of no part."""
        known = None if decided is None else set(decided)
        for part in self._parts:
            part.known = part.known or (part.noting and len(part.outputs) == self.batches)
            part.noting = not part.known and known is not None and part.owners <= known
            part.calls = 0
            if not part.known:
                part.outputs = []

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Have parts return known outputs, or note new ones, while the context lasts."""
        with ExitStack() as stack:
            for part in self._parts:
                if part.known or part.noting:
                    stack.enter_context(replaced_forward(part.module, self._forward(part)))
            yield

    def noted(self, module: nn.Module) -> nn.Module | None:
        """Return the part that a module lies in, if its outputs are being noted."""
        return next((p.module for p in self._parts if p.noting and module in set(p.module.modules())), None)

    def forget(self) -> None:
        """Drop all outputs."""
        self._parts = []

    def _forward(self, part: _Part) -> Callable:
        original = part.module.forward

        def forward(*args, **kwargs):
            number, part.calls = part.calls, part.calls + 1
            if part.known:
                output, versions = part.outputs[number]
                if versions == _versions(output):  # else the block has changed it in place
                    return _moved(output, None if self.device is None else _device(args, kwargs))
            output = original(*args, **kwargs)
            if part.noting and _can_be_kept(output):
                kept = _moved(output, self.device)
                part.outputs.append((kept, _versions(kept)))
            return output

        return forward


@contextmanager
def children_called_once(block: Block, calls: Sequence[Call]) -> Iterator[list[nn.Module]]:
    """Watch a block's children during one run. The yielded list is then filled with children whose outputs may be kept.

    Such a child holds projections, but no experts, which run in ways of their own. It is called once. Where blocks hand
    values to later ones beside the hidden states, the list stays empty: to skip a part might skip these values.
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


def _can_be_kept(output: object) -> bool:
    values = _listed(output)
    return type(output) in (tuple, torch.Tensor) and all(v is None or isinstance(v, torch.Tensor) for v in values)


def _versions(output: object) -> tuple[int, ...]:
    """Return how often each tensor has been changed in place."""
    return tuple(tensor._version for tensor in _listed(output) if tensor is not None)


def _moved(output: object, device: torch.device | None) -> object:
    """Return an output on another device; None leaves it."""
    if device is None:
        return output
    moved = [value if value is None else value.to(device) for value in _listed(output)]
    return tuple(moved) if isinstance(output, tuple) else moved[0]


def _listed(output: object) -> list:
    return list(output) if isinstance(output, tuple) else [output]


def _device(args: tuple, kwargs: dict) -> torch.device:
    """Return the device of the first tensor among arguments."""
    return next(v.device for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor))
