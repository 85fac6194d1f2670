"""Runs a decoder block by block: a run visits the blocks in order and carries streams of hidden states along.

All candidates visit a block together, so that its weights are read once and common work is done once.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cached_property, partial
from typing import Any

import torch
from torch.func import functional_call

from ..common.notes import progress
from ..compat.hf_private import execution_device, is_offloaded
from ..model.experts import ObservedExperts
from ..model.projections import Block, Decoder, Projection, patterns_of
from .block_inputs import (
    BlockInputs,
    Call,
    Stream,
    Streams,
    Wrap,
    called_blocks,
    first_output,
    keep_shared,
    limited,
    replaced_blocks,
    replaced_forward,
    restore_shared,
    reuse_tensors,
    split_hidden,
    to_device,
    watch_final_norm,
)
from .offload import BlockLoader
from .statistics import Norms, SquaredNorms, observe_inputs


# Index of a block, the block with its weights loaded, its calls, all streams -> all streams after the block.
Visit = Callable[[int, Block, Sequence[Call], Streams], Streams]


class BlockRunner:
    """Runs of blocks on hidden states, one block after the other. Use it inside [`inference`].

    `device` is where the decoder expects token ids. Hidden states beyond `max_hidden_bytes` wait in CPU memory
    between blocks. `block_forwards` counts runs of one block on one sequence. `quiet` shows no progress.
    """

    def __init__(
        self,
        decoder: Decoder,
        batch_size: int = 1,
        device: torch.device | str = "cpu",
        max_hidden_bytes: int | None = None,
        quiet: bool = False,
    ):
        self.decoder, self.batch_size, self.device = decoder, batch_size, torch.device(device)
        self.max_hidden_bytes, self._quiet = max_hidden_bytes, quiet
        self._announced: set[str] = set()  # labels
        modules = (module for block in decoder.blocks for module in block.module.modules())
        self.loader = BlockLoader(decoder.blocks) if any(map(is_offloaded, modules)) else None
        self.block_forwards = 0

    def loaded(self, index: int) -> AbstractContextManager[Block]:
        """Return a context with a block whose weights are on the device that computes."""
        return nullcontext(self.decoder.blocks[index]) if self.loader is None else self.loader.loaded(index)

    def check_replay(self, ids: torch.Tensor) -> None:
        """Check on one sequence, (1, tokens), that block-by-block outputs match those of the decoder's own forward.

        Raise `ValueError` if outputs differ, a projection is not used, or activations are not finite.
        """
        blocks = self.decoder.blocks
        outputs: list[Any] = []
        with blocks[-1].module.register_forward_hook(lambda _module, _args, output: outputs.append(output)):
            self.decoder.module(input_ids=ids.to(self.device), use_cache=False)
        expected = first_output(outputs[0])
        if not bool(torch.isfinite(expected).all()):
            raise ValueError(
                "The model's own activations contain NaN or infinity on the first calibration sequence: load it in "
                f"bfloat16 or float32 (it is {expected.dtype})."
            )
        inputs = self.capture(ids, 1)
        stream, read = Stream(inputs.hidden), set()
        for index, calls in enumerate(inputs.calls):
            with self.loaded(index) as block:
                without = self.inputs_of(block, stream, calls)
                stream, norms = self.replay(block, stream, calls)
            read.update(norms)
            if changed := next((n for n in norms if not torch.equal(without[n].value, norms[n].value)), None):
                raise ValueError(
                    f"{changed} reads the output of a projection whose role says that it only feeds the next block. Give this "
                    "one the role 'mixer' with optimum_neuronal.register_architecture."
                )
        difference, largest = (stream.batches[0] - expected).abs().max(), expected.abs().max()
        if not difference <= 1e-3 * largest:
            raise ValueError(
                f"Block-by-block outputs ({type(blocks[0].module).__name__}) don't match the model's forward pass: the largest "
                f"difference is {difference:.3g}, the largest output {largest:.3g}. If these are not the blocks, name "
                f"their list with optimum_neuronal.register_architecture({self.decoder.config.model_type!r}, "
                "Architecture(blocks='layers')). If another thread uses the model, wait until pruning has finished. "
                "Otherwise this model family is not supported."
            )
        names = self.decoder.projections
        if missing := [name for name in names if name not in read]:
            if len(missing) == len(names):
                raise ValueError(
                    f"No projection of {type(self.decoder.module).__name__} receives each token once: this model family is not "
                    "supported."
                )
            others = f" and {len(missing) - 1} others are" if len(missing) > 1 else " is"
            raise ValueError(
                f"{missing[0]}{others} not used in the model's forward, or only for some of its tokens (an MoE layer "
                f"of an unknown kind): leave them out with ignore={patterns_of(missing, names)}."
            )

    @cached_property
    def wrap(self) -> Wrap:
        return called_blocks(self.decoder, self.device)[1]

    def capture(self, ids: torch.Tensor, batch_size: int | None = None) -> BlockInputs:
        """Run the decoder once per batch of `ids`, (sequences, tokens), its blocks passing their hidden states through.

        The inputs are bit-equal to the model's own, since no block computes anything.
        """
        decoder, wrap, most = self.decoder, self.wrap, self.max_hidden_bytes
        inputs = BlockInputs(calls=[[] for _ in decoder.blocks])
        known: list[torch.Tensor] = []

        def forward(index: int, *args, **kwargs):
            hidden, call = split_hidden(args, kwargs)
            if index == 0:
                keep_shared(hidden, hidden, call)
                inputs.hidden.append(hidden)
            shared = {key: reuse_tensors(value, known) for key, value in call.kwargs.items()}
            inputs.calls[index].append(Call(reuse_tensors(call.args, known), shared))
            return wrap(hidden)

        with replaced_blocks(decoder, forward), watch_final_norm(decoder, inputs):
            for batch in ids.split(batch_size or self.batch_size):
                decoder.module(input_ids=batch.to(self.device), use_cache=False)
                if most is not None and sum(hidden.nbytes for hidden in inputs.hidden) > most:
                    inputs.hidden[-1] = to_device(inputs.hidden[-1], torch.device("cpu"))
        return inputs

    def run(
        self, inputs: BlockInputs, streams: int, visit: Visit, label: str | None = None, release: bool = False
    ) -> Streams:
        """Visit all blocks in order, and return every stream after the last one.

        Each stream starts with the hidden states of `inputs`, which are dropped from it if `release` is True. Without a
        `label`, no progress bar is shown.
        """
        flowing: Streams = [Stream(inputs.hidden)] * streams
        if release:
            inputs.hidden = []
        for index in self.progress(range(len(self.decoder.blocks)), label):
            with self.loaded(index) as block:
                flowing = limited(visit(index, block, inputs.calls[index], flowing), self.max_hidden_bytes)
        return flowing

    def for_each_block(self, work: Callable[[int, Block], Any], label: str | None = None) -> list:
        """Call a function with the index of every block and the block, its weights loaded, and return the results."""
        results = []
        for index in self.progress(range(len(self.decoder.blocks)), label):
            with self.loaded(index) as block:
                results.append(work(index, block))
        return results

    def progress(self, indices: Sequence[int], label: str | None) -> Iterator[int]:
        """Return the indices, to iterate over while [`progress`] shows a label, if there is one."""
        if label is None or self._quiet:
            return iter(indices)
        is_first = label not in self._announced
        self._announced.add(label)
        return progress(indices, label, "block", is_first)

    def replay(
        self,
        block: Block,
        stream: Stream,
        calls: Sequence[Call],
        statistic: type[SquaredNorms] | None = SquaredNorms,
        skipped: Sequence[Projection] = (),
    ) -> tuple[Stream, Norms]:
        """Run a block on a stream, and count it. Return its output, and statistics of the projections' inputs by name.

        `statistic` is their class, None for none of them. `skipped` projections, which may only feed the block's output,
        return zeros.
        """
        if block.experts:  # observed experts run by sequence, so that batches do not change a bit
            statistic = statistic or SquaredNorms
        self.block_forwards += stream.sequences
        outputs: list[torch.Tensor] = []
        observed: dict[str, SquaredNorms] = {}
        watched = {name: p.module for name, p in block.projections.items() if p.expert is None}
        watched |= {experts.name: experts.module for experts in block.experts if not experts.stacked}
        with ExitStack() as stack:
            for projection in skipped:
                if projection.expert is None:
                    stack.enter_context(replaced_forward(projection.module, partial(_zeros, projection.shape[0])))
            device = execution_device(block.module)
            for states, call in zip(stream, calls):
                restore_shared(states, call)
                states = to_device(states, device)
                with ExitStack() as observers:
                    if statistic:
                        for experts in block.experts:
                            if any(p.module is experts.module for p in block.pruned):
                                arguments = experts, block.projections, observed, len(states), statistic, skipped
                                forward = ObservedExperts(*arguments).forward
                                observers.enter_context(replaced_forward(experts.module, forward))
                        observers.enter_context(observe_inputs(watched, observed, states.shape[:2], statistic))
                    outputs.append(first_output(block.module(states, *call.args, **call.kwargs)))
                keep_shared(outputs[-1], states, call)
        return Stream(outputs), observed

    def output(self, block: Block, stream: Stream, calls: Sequence[Call]) -> Stream:
        return self.replay(block, stream, calls, statistic=None)[0]

    def inputs_of(
        self, block: Block, stream: Stream, calls: Sequence[Call], statistic: type[SquaredNorms] = SquaredNorms
    ) -> Norms:
        """Return statistics of the inputs of a block's projections, with its current weights."""
        return self.replay(block, stream, calls, statistic, self.output_projections(block))[1]

    def output_projections(self, block: Block) -> list[Projection]:
        """Return the projections that only feed the block's output, which inputs do not depend on."""
        return [p for p in block.projections.values() if self.decoder.feeds_next_block(block, p)]

    def logits(self, ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return the model's logits, float32 of shape (sequences, tokens, vocabulary), for the last block's output.

        `ids` has shape (sequences, tokens), `hidden` (sequences, tokens, hidden size).
        """
        decoder, wrap = self.decoder, self.wrap

        def forward(index: int, *args, **kwargs):
            entering = split_hidden(args, kwargs)[0]
            return wrap(to_device(hidden, entering.device) if index == len(decoder.blocks) - 1 else entering)

        if not decoder.predicts_next_token:
            raise ValueError(f"{type(decoder.model).__name__} has no causal language-model head.")
        with replaced_blocks(decoder, forward):
            return decoder.model(input_ids=ids.to(self.device), use_cache=False).logits.float()

    def total(self, per_block: Sequence[torch.Tensor]) -> float:
        """Return the sum of errors by block. Raise `ValueError` if it is not finite."""
        errors = torch.stack([error.cpu() for error in per_block])  # blocks may be on several devices
        if not bool(torch.isfinite(errors).all()):
            block = self.decoder.blocks[int((~torch.isfinite(errors)).nonzero()[0])]
            raise ValueError(f"Activations in {block.name} are not finite: load the model in bfloat16 or float32.")
        return errors.sum().item()


def output_with(
    block: Block, parameters: Mapping[str, torch.Tensor], hidden: torch.Tensor, call: Call
) -> torch.Tensor:
    """Return a block's output for one batch, with tensors in place of some parameters of its module, by their name."""
    restore_shared(hidden, call)
    hidden = to_device(hidden, next(iter(parameters.values())).device)
    return first_output(functional_call(block.module, dict(parameters), (hidden, *call.args), call.kwargs))


def _zeros(features: int, inputs: torch.Tensor) -> torch.Tensor:
    return inputs.new_zeros(*inputs.shape[:-1], features)
