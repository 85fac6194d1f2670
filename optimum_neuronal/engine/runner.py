"""Runs a decoder block by block: every run visits the blocks in order and carries streams of hidden states along.

All candidates visit a block together, so that its weights are read once and what is the same for them is done once.
"""

from collections.abc import Callable, Sequence

import torch

from ..model.projections import Block, Decoder, Projection
from .calls import Call, Wrap
from .capture import BlockInputs, capture_inputs, find_wrapper, next_token_logits
from .offload import BlockLoader
from .progress import Progress
from .replay import replay
from .replay_check import check_replay
from .statistics import Norms, SquaredNorms
from .streams import Stream, Streams, on_cpu, streams_bytes
from .unfinished import UnfinishedRun


# Index of a block, the block with its weights at hand, its calls, every stream -> every stream behind the block.
Visit = Callable[[int, Block, Sequence[Call], Streams], Streams]


class BlockRunner:
    """Runs blocks on hidden states, one after the other. Use it inside [`capture.inference`].

    Args:
        decoder ([`Decoder`]): the model's blocks and projections. Its weights are the same after every call.
        batch_size (`int`): sequences per forward.
        device (`torch.device`): where the decoder expects token ids.
        max_hidden_bytes (`int`, *optional*): more hidden states than this are kept in CPU memory between blocks.
        progress ([`Progress`], *optional*): what passes are shown by.

    Attributes:
        loader ([`BlockLoader`]): brings the blocks' weights.
        block_forwards (`int`): how often a block was run on one sequence, so far: the cost of everything.
    """

    def __init__(
        self,
        decoder: Decoder,
        batch_size: int = 1,
        device: torch.device | str = "cpu",
        max_hidden_bytes: int | None = None,
        progress: Progress | None = None,
    ):
        self.decoder, self.batch_size, self.device = decoder, batch_size, device
        self.max_hidden_bytes, self.progress = max_hidden_bytes, progress or Progress({})
        self.loader = BlockLoader(decoder.blocks)
        self.block_forwards = 0
        self._wrap: Wrap | None = None

    def check_replay(self, ids: torch.Tensor) -> None:
        """Raises `ValueError` unless replaying the blocks on one sequence, (1, tokens), gives what the model computes."""
        self._wrap = check_replay(self.decoder, ids, self.device, self.loader)
        self.block_forwards += len(self.decoder.blocks)

    def wrap(self, ids: torch.Tensor) -> Wrap:
        """How a block's output is made of hidden states, told from a forward of one of these tokens if not known."""
        if self._wrap is None:
            self._wrap = find_wrapper(self.decoder, ids, self.device)
        return self._wrap

    def capture(self, ids: torch.Tensor, batch_size: int | None = None) -> BlockInputs:
        """What the blocks are called with for these sequences, see [`capture_inputs`]."""
        size, budget = batch_size or self.batch_size, self.max_hidden_bytes
        wrap = self.wrap(ids)
        return capture_inputs(self.decoder, ids, size, self.device, wrap=wrap, max_hidden_bytes=budget)

    def run(
        self,
        inputs: BlockInputs,
        streams: int,
        visit: Visit,
        label: str | None = None,
        unfinished: UnfinishedRun | None = None,
        release: bool = False,
    ) -> Streams:
        """Visits all blocks in order.

        Args:
            inputs ([`BlockInputs`]): every stream begins with its hidden states.
            streams (`int`): how many there are.
            visit: what to do at a block, see [`Visit`].
            label (`str`, *optional*): what its progress is called; None shows none.
            unfinished ([`UnfinishedRun`], *optional*):
                Receives what `visit` measures; how far the run has come is recorded with it, and an interrupted run
                goes on from there.
            release (`bool`): whether nobody else needs the first block's inputs.

        Returns:
            `list`: every stream behind the last block.
        """
        start, flowing = _where_to_begin(Stream(inputs.hidden), streams, unfinished)
        if release:
            inputs.hidden = []
        for index in self.progress.over(range(start, len(inputs.calls)), label):
            with self.loader.loaded(index) as block:
                flowing = self._within_budget(visit(index, block, inputs.calls[index], flowing))
            if unfinished is not None:
                unfinished.note(index + 1, flowing)
        return flowing

    def replay(
        self,
        block: Block,
        stream: Stream,
        calls: Sequence[Call],
        record: type[SquaredNorms] | None = SquaredNorms,
        skipped: Sequence[Projection] = (),
    ) -> tuple[Stream, Norms]:
        """Runs a block on every batch and counts it; what is recorded of its inputs and what it skips: [`replay`]."""
        self.block_forwards += stream.sequences
        if record is None and block.experts:  # experts always run as while recorded: by sequence, whatever the batch
            record = SquaredNorms
        outputs, norms = replay(block, stream.batches, calls, record, skipped)
        return Stream(outputs), norms

    def output(self, block: Block, stream: Stream, calls: Sequence[Call]) -> Stream:
        """What a block puts out, with the weights that it has at the moment."""
        return self.replay(block, stream, calls, record=None)[0]

    def inputs_of(
        self, block: Block, stream: Stream, calls: Sequence[Call], statistic: type[SquaredNorms] = SquaredNorms
    ) -> Norms:
        """What the dense block's projections receive on these hidden states."""
        return self.replay(block, stream, calls, statistic, self.output_projections(block))[1]

    def output_projections(self, block: Block) -> list[Projection]:
        """What only feeds the block's output (an eighth of a Llama's work), skipped where norms are all we want."""
        return [p for p in block.projections.values() if self.decoder.feeds_next_block(block, p)]

    def logits(self, ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """What the model makes of the last block's output for these token ids, see [`next_token_logits`]."""
        return next_token_logits(self.decoder, ids, hidden, self.wrap(ids), self.device)

    def total(self, per_block: Sequence[torch.Tensor]) -> float:
        """Sum of what was measured block by block. Raises `ValueError` if it is not finite."""
        errors = torch.stack([error.cpu() for error in per_block])  # blocks may lie on several devices
        if not bool(torch.isfinite(errors).all()):
            block = self.decoder.blocks[int((~torch.isfinite(errors)).nonzero()[0])]
            raise ValueError(f"Activations in {block.name} are not finite: they overflow in the model's dtype.")
        return errors.sum().item()

    def _within_budget(self, streams: Streams) -> Streams:
        if self.max_hidden_bytes is None or streams_bytes(streams) <= self.max_hidden_bytes:
            return streams
        return on_cpu(streams)


def _where_to_begin(beginning: Stream, streams: int, unfinished: UnfinishedRun | None) -> tuple[int, Streams]:
    """Index of the first block to visit, and every stream in front of it."""
    found = None if unfinished is None else unfinished.recall(beginning)
    return (0, [beginning] * streams) if found is None else found
