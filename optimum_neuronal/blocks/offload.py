"""Weights in CPU memory or on disk (accelerate's offloading), loaded onto their device block by block.

A module with offloaded weights holds meta tensors, and accelerate's hook reads them from its `weights_map` at each
forward. Here a block is read once for all work with it, while the next one is read ahead.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from ..common.torch_state import trim_heap
from ..compat import hf_private
from ..model.change import Change
from ..model.projections import Block, Decoder, Projection, trial_weights


Weights = list[tuple[nn.Module, dict[str, torch.Tensor]]]  # module -> its own parameters by name


class BlockLoader:
    """Loads offloaded weights of blocks onto the device that computes."""

    def __init__(self, blocks: Sequence[Block]):
        self._blocks = blocks
        self._executor = ThreadPoolExecutor(1, "weights")
        self._ahead: tuple[int, Future] | None = None

    @contextmanager
    def loaded(self, index: int) -> Iterator[Block]:
        """Load the weights of a block as ordinary parameters while the context lasts.

        Changes to them are lost, see [`change_offloaded`].
        """
        block = self._blocks[index]
        ahead, future = self._ahead or (None, None)
        weights = future.result() if ahead == index else _read(block)
        self._ahead = None
        if index + 1 < len(self._blocks):
            self._ahead = index + 1, self._executor.submit(_read, self._blocks[index + 1])
        with ExitStack() as stack:
            _put_in_place(weights, stack)
            del weights, future
            yield block
        trim_heap()


def _read(block: Block) -> Weights:
    weights = []
    for module in filter(hf_private.is_offloaded, block.module.modules()):
        hook = hf_private.offload_hook(module)
        parameters = module.named_parameters(recurse=hook.place_submodules)
        names = [name for name, tensor in parameters if tensor.is_meta]
        # Copied: the tensor is a view of a file, which would be read again whenever memory is short.
        weights.append((module, {name: hook.weights_map[name].to(hook.execution_device, copy=True) for name in names}))
    return weights


def _put_in_place(weights: Weights, stack: ExitStack) -> None:
    """Give modules their weights until the stack closes. Meanwhile their hooks read nothing."""
    for module, tensors in weights:
        hook = hf_private.offload_hook(module)
        stack.callback(setattr, hook, "offload", hook.offload)
        hook.offload = False
        for name, tensor in tensors.items():
            parent, _, last = name.rpartition(".")
            owner = module.get_submodule(parent)
            stack.callback(setattr, owner, last, getattr(owner, last))
            setattr(owner, last, nn.Parameter(tensor, requires_grad=False))


class ChangedWeights(Mapping):
    """A `weights_map` whose weights become sparse whenever they are read: files of a model on disk do not change.

    Changes are kept packed: a mask takes one bit per weight; a saliency that updates weights adds the kept ones.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor]):
        self._weights = weights
        self.changes: dict[str, list[tuple[Projection, Change]]] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor, changes = self._weights[name], self.changes.get(name, ())
        if changes:
            tensor = tensor.clone()
        for projection, change in changes:
            change.apply_to(projection.view(tensor))
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def change_offloaded(projection: Projection, change: Change) -> None:
    """Make an offloaded projection sparse whenever it is read from now on."""
    hook = hf_private.offload_hook(projection.module)
    if not isinstance(hook.weights_map, ChangedWeights):
        hook.weights_map = ChangedWeights(hook.weights_map)
    hook.weights_map.changes.setdefault(projection.parameter, []).append((projection, change))


@contextmanager
def changed_weights(decoder: Decoder, changes: Mapping[str, Change]) -> Iterator[None]:
    """Let a model compute with changes while the context lasts, offloaded ones whenever their weights are read."""
    projections = list(decoder.projections.values())
    offloaded = [p for p in projections if hf_private.is_offloaded(p.module)]
    maps = {hook: hook.weights_map for hook in (hf_private.offload_hook(p.module) for p in offloaded)}
    try:
        for hook, weights in maps.items():
            hook.weights_map = ChangedWeights(weights)  # its own, since an earlier pruning run may have left some
        for projection in offloaded:
            change_offloaded(projection, changes[projection.name])
        with trial_weights([p for p in projections if p not in offloaded], lambda p: changes[p.name]):
            yield
    finally:
        for hook, weights in maps.items():
            hook.weights_map = weights
