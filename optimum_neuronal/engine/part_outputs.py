"""What parts of a block put out, batch by batch, so that they need not run again while that stays the same.

Where a block runs up to one of its projections after the other, most of the work would be to repeat what comes before.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from ..model.projections import Block
from .calls import Call, replaced_forward, shared_containers


class _Part:
    """One child of a block: what it has put out, and whether that is being noted."""

    def __init__(self, module: nn.Module, owners: set[nn.Parameter]):
        self.module, self.owners = module, owners
        self.outputs: list[tuple[object, tuple[int, ...]]] = []
        self.noting, self.known, self.calls = False, False, 0


class PartOutputs:
    """Outputs of those children of a block that hold projections, for one stream of hidden states.

    ```python
    parts.begin(decided)
    for batch in batches:
        with parts.in_place():
            block(batch)
    ```

    Args:
        block ([`Block`]): to run.
        children (`Collection[Module]`): those that may be noted, see [`children_called_once`].
        batches (`int`): how many batches the stream has; every run is of all of them, in order.
        device (`torch.device`, *optional*): where outputs wait. None: where they are.
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
        """A run of all batches begins. Of parts whose pruned weights are all among these, outputs are noted; None: of none."""
        known = None if decided is None else set(decided)
        for part in self._parts:
            part.known = part.known or (part.noting and len(part.outputs) == self.batches)
            part.noting = not part.known and known is not None and part.owners <= known
            part.calls = 0
            if not part.known:
                part.outputs = []

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """While the context lasts, parts whose outputs are known return them, and those to be noted are."""
        with ExitStack() as stack:
            for part in self._parts:
                if part.known or part.noting:
                    stack.enter_context(replaced_forward(part.module, self._forward(part)))
            yield

    def noted(self, module: nn.Module) -> nn.Module | None:
        """The part that a module lies in, if its outputs are being noted."""
        return next((p.module for p in self._parts if p.noting and module in set(p.module.modules())), None)

    def forget(self) -> None:
        """Lets go of all outputs."""
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
    """While the context lasts, the block's children are watched; behind it, those are listed whose outputs may be kept.

    They hold projections but no experts, which run in ways of their own, and are called once in the block's one run. Where
    blocks hand values to later ones beside the hidden states, there are none: to skip a part might skip that.
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
    """How often each tensor has been changed in place."""
    return tuple(tensor._version for tensor in _listed(output) if tensor is not None)


def _moved(output: object, device: torch.device | None) -> object:
    """The same on another device. None: as it is."""
    if device is None:
        return output
    moved = [value if value is None else value.to(device) for value in _listed(output)]
    return tuple(moved) if isinstance(output, tuple) else moved[0]


def _listed(output: object) -> list:
    return list(output) if isinstance(output, tuple) else [output]


def _device(args: tuple, kwargs: dict) -> torch.device:
    """Where a part is called: of the first tensor that it is given."""
    return next(v.device for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor))
