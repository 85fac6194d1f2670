"""Runs a decoder block by block: every run visits the blocks in order and carries streams of hidden states along.

All candidates visit a block together, so that its weights are read once and common work is done once.
"""

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from transformers.utils import logging

from ..model.projections import Block, Decoder, Projection
from .block_inputs import BlockInputs, block_outputs, capture_inputs, find_wrapper, next_token_logits
from .calls import Call, Stream, Streams, Wrap, first_output, on_cpu, output_wrapper, streams_bytes
from .offload import BlockLoader
from .replay import replay
from .statistics import Norms, SquaredNorms


# Index of a block, the block with its weights at hand, its calls, every stream -> every stream behind the block.
Visit = Callable[[int, Block, Sequence[Call], Streams], Streams]


class BlockRunner:
    """Runs of blocks on hidden states, one block after the other. Use it inside [`capture.inference`].

    Args:
        decoder ([`Decoder`]): the model's blocks and projections. Its weights are the same after every call.
        batch_size (`int`): sequences per forward.
        device (`torch.device`): where the decoder expects token ids.
        max_hidden_bytes (`int`, *optional*): more hidden states than this wait in CPU memory between blocks.
        quiet (`bool`): True to show no progress.

    Attributes:
        loader ([`BlockLoader`]): brings the blocks' weights.
        block_forwards (`int`): runs of one block on one sequence so far.
    """

    def __init__(
        self,
        decoder: Decoder,
        batch_size: int = 1,
        device: torch.device | str = "cpu",
        max_hidden_bytes: int | None = None,
        quiet: bool = False,
    ):
        self.decoder, self.batch_size, self.device = decoder, batch_size, device
        self.max_hidden_bytes, self._quiet = max_hidden_bytes, quiet
        self._shown, self._bar_is_shown = None, False
        self.loader = BlockLoader(decoder.blocks)
        self.block_forwards = 0
        self._wrap: Wrap | None = None

    def check_replay(self, ids: torch.Tensor) -> None:
        """Raise `ValueError` unless replaying the blocks on one sequence, (1, tokens), gives the model's own output."""
        self._wrap = check_replay(self.decoder, ids, self.device, self.loader)
        self.block_forwards += len(self.decoder.blocks)

    def wrap(self, ids: torch.Tensor) -> Wrap:
        """Return the [`output_wrapper`] of the blocks. If unknown, it is found by a forward of one of these tokens."""
        if self._wrap is None:
            self._wrap = find_wrapper(self.decoder, ids, self.device)
        return self._wrap

    def capture(self, ids: torch.Tensor, batch_size: int | None = None) -> BlockInputs:
        """Return the calls of the blocks for these sequences, see [`capture_inputs`]."""
        size, budget = batch_size or self.batch_size, self.max_hidden_bytes
        wrap = self.wrap(ids)
        return capture_inputs(self.decoder, ids, size, self.device, wrap=wrap, max_hidden_bytes=budget)

    def run(
        self,
        inputs: BlockInputs,
        streams: int,
        visit: Visit,
        label: str | None = None,
        release: bool = False,
    ) -> Streams:
        """Visit all blocks in order, and return every stream behind the last one.

        Args:
            inputs ([`BlockInputs`]): every stream begins with its hidden states.
            streams (`int`): their number.
            visit: the work at a block, see [`Visit`].
            label (`str`, *optional*): of the progress bar; None shows none.
            release (`bool`): True if nobody else needs the first block's inputs.
        """
        flowing: Streams = [Stream(inputs.hidden)] * streams
        if release:
            inputs.hidden = []

        def advance(index: int, block: Block) -> None:
            nonlocal flowing
            flowing = self._within_budget(visit(index, block, inputs.calls[index], flowing))

        self.for_each_block(advance, label)
        return flowing

    def for_each_block(
        self,
        work: Callable[[int, Block], Any],
        label: str | None = None,
        backward: bool = False,
        weights: bool = True,
    ) -> list:
        """Return what a function returns for every block, with its index and its weights at hand, in the order of its calls.

        Args:
            work: index, block -> anything.
            label (`str`, *optional*): of the progress bar; None shows none.
            backward (`bool`): True to go from the last block to the first.
            weights (`bool`): False if the work needs no weights: offloaded ones are not loaded then.
        """
        found, indices = [], range(len(self.decoder.blocks))
        for index in self.shown_by_bar(indices[::-1] if backward else indices, label):
            with self.loader.loaded(index, backward) if weights else nullcontext(self.decoder.blocks[index]) as block:
                found.append(work(index, block))
        return found

    def shown_by_bar(self, indices: Sequence[int], label: str | None, unit: str = "block") -> Iterator[int]:
        """Yield indices beside a progress bar, the only one at a time; without a terminal, write a line for each step."""
        if label is None or self._quiet or not logging.is_progress_bar_enabled():
            yield from indices
            return
        before, self._shown = self._shown, label
        if before != label and not sys.stderr.isatty():
            sys.stderr.write(f"{label}\n")
        nested = self._bar_is_shown
        self._bar_is_shown = True
        try:
            yield from logging.tqdm(indices, desc=label, unit=unit, leave=False, disable=nested or None)
        finally:
            self._bar_is_shown = nested

    def replay(
        self,
        block: Block,
        stream: Stream,
        calls: Sequence[Call],
        record: type[SquaredNorms] | None = SquaredNorms,
        skipped: Sequence[Projection] = (),
    ) -> tuple[Stream, Norms]:
        """Run a block on every batch, and count it. Other arguments: see [`replay`]."""
        if record is None and block.experts:  # experts always run as while recorded: by sequence, whatever the batch
            record = SquaredNorms
        with self.counted(stream.sequences):
            outputs, norms = replay(block, stream.batches, calls, record, skipped)
        return Stream(outputs), norms

    @contextmanager
    def counted(self, block_forwards: int) -> Iterator[None]:
        """Count runs of a block on one sequence, which are made while the context lasts."""
        self.block_forwards += block_forwards
        yield

    def pass_on(self, _index: int, block: Block, calls: Sequence[Call], streams: Streams) -> Streams:
        """Visit a block in [`run`] with one stream, and do nothing else."""
        return [self.output(block, streams[0], calls)]

    def output(self, block: Block, stream: Stream, calls: Sequence[Call]) -> Stream:
        """Return a block's output with its current weights."""
        return self.replay(block, stream, calls, record=None)[0]

    def inputs_of(
        self, block: Block, stream: Stream, calls: Sequence[Call], statistic: type[SquaredNorms] = SquaredNorms
    ) -> Norms:
        """Return the inputs of the dense block's projections for these hidden states."""
        return self.replay(block, stream, calls, statistic, self.output_projections(block))[1]

    def output_projections(self, block: Block) -> list[Projection]:
        """Return the projections that only feed the block's output (an eighth of a Llama's work). Norms do not need them."""
        return [p for p in block.projections.values() if self.decoder.feeds_next_block(block, p)]

    def logits(self, ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return the model's logits for the last block's output, see [`next_token_logits`]."""
        return next_token_logits(self.decoder, ids, hidden, self.wrap(ids), self.device)

    def total(self, per_block: Sequence[torch.Tensor]) -> float:
        """Return the sum of errors by block. Raises `ValueError` if it is not finite."""
        errors = torch.stack([error.cpu() for error in per_block])  # blocks may lie on several devices
        if not bool(torch.isfinite(errors).all()):
            block = self.decoder.blocks[int((~torch.isfinite(errors)).nonzero()[0])]
            raise ValueError(f"Activations in {block.name} are not finite: they overflow in the model's dtype.")
        return errors.sum().item()

    def _within_budget(self, streams: Streams) -> Streams:
        if self.max_hidden_bytes is None or streams_bytes(streams) <= self.max_hidden_bytes:
            return streams
        return on_cpu(streams)


def check_replay(decoder: Decoder, ids: torch.Tensor, device: torch.device | str, loader: BlockLoader) -> Wrap:
    """Compare replaying the blocks, with their inputs recorded, with the decoder's own forward.

    Args:
        decoder ([`Decoder`]): the model's blocks and projections.
        ids (`Tensor` of int64, shape (1, tokens)): one sequence.
        device (`torch.device`): where the decoder expects token ids.
        loader ([`BlockLoader`]): brings the blocks' weights.

    Returns:
        The [`output_wrapper`] of the blocks.

    Raises:
        `ValueError`: they differ, so the family is not understood; a projection takes no part in the forward; or the
            activations are not finite.
    """
    begin, end = block_outputs(decoder, [decoder.blocks[0], decoder.blocks[-1]], ids.to(device))
    wrap, expected = output_wrapper(begin), first_output(end)
    if not bool(torch.isfinite(expected).all()):
        raise ValueError(
            "The model's own activations contain NaN or infinity on the first calibration sequence: load it in "
            f"bfloat16 or float32 (it is {expected.dtype})."
        )
    inputs = capture_inputs(decoder, ids, 1, device, wrap=wrap)
    hidden = inputs.hidden
    for index, calls in enumerate(inputs.calls):
        with loader.loaded(index) as block:
            hidden, norms = replay(block, hidden, calls)
        for name in block.pruned_names:
            if name not in norms:
                raise ValueError(
                    f"{name} takes no part in the model's forward, or receives only some of the tokens (a mixture of "
                    f"experts of a kind that is not understood): leave it out with ignore=[{re.escape(name)!r}]."
                )
    difference, largest = (hidden[0] - expected).abs().max(), expected.abs().max()
    if not difference <= 1e-3 * largest:
        raise ValueError(
            f"Replaying the blocks ({type(decoder.blocks[0].module).__name__}) does not give what the model computes: "
            f"the largest difference is {difference:.3g}, where the largest output is {largest:.3g}. Were the wrong "
            "modules taken for the blocks, name the list with optimum_neuronal.register_architecture(model_type, "
            f"Architecture(blocks='layers')), model_type being {decoder.config.model_type!r}; else this model family "
            "is not supported."
        )
    return wrap
