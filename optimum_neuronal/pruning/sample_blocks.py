"""A sample of a model's blocks with random weights, on which a dry run measures what a prune does."""

import copy
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from ..blocks.block_inputs import BlockInputs
from ..blocks.calls import Streams, streams_bytes
from ..blocks.runner import BlockRunner, Visit
from ..compat import hf_private
from ..model.experts import experts_per_token
from ..model.find_blocks import find_decoder
from ..model.projections import Block, Decoder
from .refit import Refit
from .work import BLOCKS, COMPARING, FIRST, FORWARDS, HIDDEN, KEPT, LAST, MIDDLE, MOMENT, OTHER, OUTSIDE, RUNS, Work


MOST = {False: 2**22, True: 2**21}  # weights of a block that is measured on a CPU as it is, by whether they are solved
MOST_ELSEWHERE = 2**27
SHORT = 512  # tokens of a sequence in front of blocks that are narrowed
HEAD = 64  # of a narrower stand-in

clock = time.perf_counter


def sample_decoder(decoder: Decoder, device: torch.device) -> Decoder:
    """Return a copy of a decoder with random weights, and with at most three of its blocks, pruned ones if it has any.

    Args:
        decoder ([`Decoder`]): on the meta device.
        device (`torch.device`): of the copy.
    """
    copied = copy.deepcopy(decoder)
    pruned = [index for index, block in enumerate(copied.blocks) if block.pruned]
    others = [index for index, block in enumerate(copied.blocks) if not block.pruned]
    kept = sorted((pruned + others)[:BLOCKS])
    modules = copied.model.get_submodule(copied.blocks[0].name.rpartition(".")[0])
    for index in reversed(range(len(modules))):
        if index not in kept:
            del modules[index]
    hf_private.fill_at_random(copied.model)
    copied.model.to(device).eval()
    return replace(copied, blocks=[copied.blocks[index] for index in kept])


def narrow_decoder(decoder: Decoder, narrower: float) -> Decoder:
    """Return a Llama on the meta device with blocks of `1 / narrower ** 2` of a decoder's weights in a token's way."""
    width = max(HEAD, HEAD * round(decoder.config.hidden_size / narrower / HEAD))
    weights = max(active_weights(block, decoder) for block in decoder.blocks) / narrower**2
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=max(HEAD, round((weights - 4 * width**2) / (3 * width))),
        num_hidden_layers=min(BLOCKS, len(decoder.blocks)),
        num_attention_heads=width // HEAD,
        vocab_size=getattr(decoder.config, "vocab_size", None) or 1000,
        max_position_embeddings=2**17,
        dtype=decoder.model.dtype,
    )
    with torch.device("meta"):
        return find_decoder(hf_private.from_config(LlamaForCausalLM, config, dtype=decoder.model.dtype))


def active_weights(block: Block, decoder: Decoder) -> float:
    """Return the number of a block's weights that a token is multiplied with."""
    per_token = experts_per_token(decoder.config)
    experts = {p.owner for p in block.projections.values() if p.expert is not None} if per_token else ()
    return _weights(block) - sum(owner.numel() * (1 - per_token / len(owner)) for owner in experts)


def _weights(block: Block) -> int:
    return sum(weight.numel() for weight in block.module.parameters())


class MeasuredRunner(BlockRunner):
    """A runner that notes the work of a question by place. In the first block it warms up, and counts bytes.

    Args:
        middle (`float`): weights of all blocks of the model but the first and the last, in the sample's block in the middle.
        narrower (`float`): how often the sample's width goes into the model's.
        power (`int`): of the width that work on weights grows with.
        tokens, longer (`int`, `float`): tokens of a sequence, and how often they go into a sequence of the model's.
    """

    def __init__(
        self,
        decoder: Decoder,
        batch_size: int,
        device: torch.device,
        middle=0.0,
        narrower=1.0,
        power=2,
        tokens=1,
        longer=1.0,
    ):
        super().__init__(decoder, batch_size, device, quiet=True)
        self.middle, self.tokens = middle, tokens
        self._wider = Work(np.ones((4, 3)), np.array([narrower**2, narrower * longer, narrower**2, 1]))
        self._wider.spent[:OUTSIDE, :FORWARDS] = narrower**2 * longer, narrower**power
        self._wider.spent[OUTSIDE, :FORWARDS] = narrower * longer
        self._works: dict[str, Work] = {}
        self._now: tuple[str, int, int] = ("", OUTSIDE, OTHER)  # label, row and column of the work that is being done
        self._since, self._bytes = 0.0, LiveBytes()

    @classmethod
    def of(
        cls, decoder: Decoder, solves: bool, tokens: int, batch_size: int, device: torch.device
    ) -> "MeasuredRunner":
        """Return a runner of a sample of a decoder. Wide blocks are narrowed, and their sequences cut."""
        active = max(active_weights(block, decoder) for block in decoder.blocks)
        most = MOST[solves] if device.type == "cpu" else MOST_ELSEWHERE
        narrower = max(1.0, (active / most) ** 0.5)
        sample = sample_decoder(decoder if narrower == 1 else narrow_decoder(decoder, narrower), device)
        own, model = ([_weights(block) for block in of.blocks] for of in (sample, decoder))
        if narrower > 1:
            model = [weights / max(model) * max(own) for weights in model]
        middle = max(0.0, sum(model) - own[0] - own[-1]) / own[len(own) // 2] if len(model) > 2 else 0.0
        short = min(tokens, SHORT) if narrower > 1 else tokens
        return cls(sample, batch_size, device, middle, narrower, 3 if solves else 2, short, tokens / short)

    def measure(self, label: str, ask: Callable[[], Any]) -> tuple[Any, dict[str, Work]]:
        """Return the answer to a question, and its work by label: also that of runs that it needed, with their own labels."""
        self._works, self._now, self._bytes = {label: Work()}, (label, OUTSIDE, OTHER), LiveBytes()
        self._since = self._seconds()
        with self._bytes:
            answer = ask()
        self._switch(*self._now)
        memory = self._works[label].memory
        memory[COMPARING] = self._bytes.peak - self._bytes.now
        memory[KEPT] = bytes_of(answer) / len(self.decoder.blocks)
        for work in self._works.values():
            if len(self.decoder.blocks) == BLOCKS:
                work.spent[FIRST, :FORWARDS] = work.spent[MIDDLE, :FORWARDS]
            work.spent *= self._wider.spent
            work.memory *= self._wider.memory
        return answer, self._works

    def for_each_block(
        self,
        work: Callable[[int, Block], Any],
        label: str | None = None,
        backward: bool = False,
        weights: bool = True,
    ) -> list:
        last = len(self.decoder.blocks) - 1

        def noted(index: int, block: Block) -> Any:
            before, place = self._now, FIRST if index == 0 else LAST if index == last else MIDDLE
            self._switch(label or before[0], place, OTHER)
            with self._counting(self._works[self._now[0]]) if index == 0 else self._bytes.paused():
                found = work(index, block)
            self._switch(*before)
            return found

        return super().for_each_block(noted, label)

    @contextmanager
    def _counting(self, work: Work) -> Iterator[None]:
        """Note the bytes of a block's visit."""
        live = self._bytes
        held, hidden, live.peak, live.retained = live.now, live.hidden, live.now, live.hidden
        yield
        work.memory[MOMENT] = max(work.memory[MOMENT], live.peak - held - (live.retained - hidden))
        live.peak = live.now

    def run(self, inputs: BlockInputs, streams: int, visit: Visit, label: str | None = None, release: bool = False):
        parts = 0

        def noted(index, block, calls, flowing: Streams) -> Streams:
            nonlocal parts
            label, before = self._now[0], self._bytes.hidden
            outputs = visit(index, block, calls, flowing)
            if index == 0:
                parts = max(0, self._bytes.retained - before - streams_bytes(outputs))
            memory = self._works[label].memory
            memory[HIDDEN] = max(memory[HIDDEN], parts + streams_bytes([*flowing, *outputs]))
            return outputs

        return super().run(inputs, streams, noted, label, release)

    @contextmanager
    def counted(self, block_forwards: int) -> Iterator[None]:
        label, place, kind = self._now
        self._switch(label, place, RUNS)
        self._works[label].spent[place, FORWARDS] += block_forwards
        with super().counted(block_forwards):
            yield
        self._bytes.retained = max(self._bytes.retained, self._bytes.hidden)
        self._switch(label, place, kind)

    def add(self, seconds: float) -> None:
        """Add seconds to the work that is being done."""
        self._works[self._now[0]].spent[self._now[1:]] += seconds

    def _switch(self, label: str, place: int, kind: int) -> None:
        """Note the seconds up to now, and begin work of another kind."""
        now = self._seconds()
        self.add(now - self._since)
        self._works.setdefault(label, Work())
        self._now, self._since = (label, place, kind), now

    def _seconds(self) -> float:
        if torch.device(self.device).type != "cpu":
            torch.accelerator.synchronize(self.device)
        return clock()


@dataclass(frozen=True)
class FirstEpoch(Refit):
    """A refit that runs one epoch and takes the others for as long.

    Args:
        runner ([`MeasuredRunner`], *optional*): notes them.
    """

    runner: MeasuredRunner | None = None

    def fit(self, *args, **kwargs) -> dict[str, torch.Tensor]:
        start = clock()
        fitted = Refit(1, self.learning_rate).fit(*args, **kwargs)
        self.runner.add((self.epochs - 1) * (clock() - start))
        return fitted


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors that were made while the context lasts and still exist.

    Attributes:
        now, peak (`int`): at present, and at most.
        hidden (`int`): at present, of tensors with a value for each sequence and token: shape (sequences, tokens, features).
        retained (`int`): the largest `hidden` behind a run of a block.
    """

    def __init__(self):
        super().__init__()
        self.now = self.peak = self.hidden = self.retained = 0
        self._alive: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in given and storage._cdata not in self._alive:
                self._add(storage, storage.nbytes(), tensor.ndim == 3)
        return result

    def _add(self, storage: torch.UntypedStorage, size: int, is_hidden: bool) -> None:
        key = storage._cdata

        def forget(_reference) -> None:
            del self._alive[key]
            self.now -= size
            self.hidden -= size * is_hidden

        self._alive[key] = weakref.ref(storage, forget)
        self.now += size
        self.hidden += size * is_hidden
        self.peak = max(self.peak, self.now)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the context for a while."""
        self.__exit__(None, None, None)
        try:
            yield
        finally:
            self.__enter__()


def bytes_of(value: Any) -> int:
    """Return the bytes of all tensors in a value: in dataclasses, mappings, lists and tuples."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, Mapping):
        return sum(map(bytes_of, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(bytes_of, value))
    return sum(bytes_of(getattr(value, entry.name)) for entry in fields(value)) if is_dataclass(value) else 0


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
