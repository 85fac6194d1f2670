"""The engine: takes streams of hidden states through a model's blocks, and does, records and shares the work once.

Every pass visits the blocks in order and carries *streams* of hidden states from one to the next, one stream for each
candidate, so that all candidates visit a block together and share what is the same for them.
"""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.utils import logging

from ..decoder.projections import Block, Decoder, Projection
from ..decoder.trial import ChangeOf
from ..metrics.projection_activations import projection_activations
from ..metrics.statistics import Norms, SquaredNorms
from ..runtime.journal import Journal
from ..runtime.processes import Processes
from ..saliency import Saliency
from ..sparsity.changes import NewWeight, Zeros
from ..sparsity.cuts import Cut, apply_cut, find_cut, prune_rows, sort_rows
from ..sparsity.pattern import ColumnPattern, prune_columns
from ..sparsity.plan import SparsityPlan
from .calls import Call, Wrap, hidden_bytes, output_wrapper, to_device
from .capture import BlockInputs, block_outputs, capture_inputs
from .offload import BlockLoader
from .replay import replay
from .replay_check import check_replay
from .unfinished import Hidden, recall_sweep, record_sweep


REFERENCES = ("sparse-stream", "dense")
RECORD_EVERY = 60.0  # seconds between two records of an unfinished sweep

Visit = Callable[[int, Block, Sequence[Call], list[Hidden]], list[Hidden]]


class Engine:
    """Runs a decoder block by block over calibration sequences. Use it inside [`capture.inference`].

    Args:
        decoder ([`Decoder`]): the model's blocks and projections. Its weights are the same after every call.
        saliency ([`Saliency`]): decides which weights of a projection fall.
        ids (`Tensor` of int64, shape (sequences, tokens)): all calibration sequences.
        num_alignment_samples (`int`): how many of them, from the first, trials are measured on.
        batch_size (`int`): sequences per forward.
        device (`torch.device`): where the decoder expects token ids.
        min_expert_tokens (`int`): an expert that receives fewer falls back, see [`projection_activations`].
        max_hidden_bytes (`int`, *optional*): more hidden states than this are kept in CPU memory between blocks.
        pattern ([`ColumnPattern`], *optional*): N:M, if zeros have to follow one.
        journal ([`Journal`], *optional*): where finished steps and blocks are recorded, and looked up.
        processes ([`Processes`], *optional*): with whom the work is shared.
        kept (`dict`, *optional*):
            What engines for the same model and sequences find once and share: hidden states, dense activations, scores.
            If given, nothing of it is let go before the end.

    Attributes:
        block_forwards (`int`): how often a block was run on one sequence, so far: the cost of everything.
    """

    def __init__(
        self,
        decoder: Decoder,
        saliency: Saliency,
        ids: torch.Tensor,
        num_alignment_samples: int,
        batch_size: int = 1,
        device: torch.device | str = "cpu",
        min_expert_tokens: int = 1,
        max_hidden_bytes: int | None = None,
        pattern: ColumnPattern | None = None,
        journal: Journal | None = None,
        processes: Processes | None = None,
        kept: dict[Any, Any] | None = None,
    ):
        self.decoder, self.saliency, self.ids, self.pattern = decoder, saliency, ids, pattern
        self.num_alignment_samples, self.batch_size, self.device = num_alignment_samples, batch_size, device
        self.min_expert_tokens, self.max_hidden_bytes = min_expert_tokens, max_hidden_bytes
        self.journal, self.processes = journal or Journal(), processes or Processes()
        self.loader = BlockLoader(decoder.blocks)
        self._recorded_at = time.monotonic()
        self._wrap: Wrap | None = None
        self.block_forwards = 0
        self._kept, self._keeps = kept if kept is not None else {}, kept is not None

    def check_replay(self) -> None:
        """Raises `ValueError` unless replaying the blocks gives what the model computes: see [`checks.check_replay`]."""
        self._wrap = check_replay(self.decoder, self.ids[:1], self.device, self.loader)
        self.block_forwards += len(self.decoder.blocks)

    @property
    def wrap(self) -> Wrap:
        """How a block's output is made of hidden states, see [`output_wrapper`]."""
        if self._wrap is None:
            first = block_outputs(self.decoder, self.decoder.blocks[:1], self.ids[:1, :1].to(self.device))
            self._wrap = output_wrapper(first[0])
        return self._wrap

    def capture(self, ids: torch.Tensor) -> BlockInputs:
        """What the blocks are called with for these sequences, see [`capture_inputs`]."""
        budget = self.max_hidden_bytes
        return capture_inputs(self.decoder, ids, self.batch_size, self.device, wrap=self.wrap, max_hidden_bytes=budget)

    def kept(self, key: Any, make: Callable[[], Any]) -> Any:
        """What was made under a key before, or is made now and kept."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    def alignment_inputs(self) -> BlockInputs:
        """What the blocks are called with for the sequences that trials are measured on. Kept."""
        key = ("inputs", self.batch_size)
        return self.kept(key, lambda: self.capture(self.ids[: self.num_alignment_samples]))

    def capture_all(self, statistic: type[SquaredNorms]) -> BlockInputs:
        """The same for all sequences, or for this process's share of them. To be put together by [`joined`]."""
        ids = self.ids
        return self.capture(ids[self.processes.part(len(ids))] if self._shares(statistic) else ids)

    def joined(self, norms: Norms, statistic: type[SquaredNorms]) -> Norms:
        """Norms over the sequences of all processes, in their order."""
        if not self._shares(statistic):
            return norms
        joined: dict[int, SquaredNorms] = {}
        for norm in norms.values():
            if id(norm) not in joined:
                tokens = sum(self.processes.collect([norm.tokens]))
                joined[id(norm)] = SquaredNorms.of(self.processes.join(norm.value, len(self.ids)), tokens)
        return {name: joined[id(norm)] for name, norm in norms.items()}

    def _shares(self, statistic: type[SquaredNorms]) -> bool:
        """Whether the processes share the sequences. Sums over all sequences would depend on how they are shared."""
        return statistic is SquaredNorms and self.processes.shares(len(self.ids))

    def release(self) -> None:
        """Lets go of what is kept for trials, before the final pruning needs the memory, unless it is to be shared."""
        if not self._keeps:
            self._kept.clear()

    def run(
        self,
        inputs: BlockInputs,
        streams: int,
        visit: Visit,
        label: str | None,
        kept: dict[str, torch.Tensor] | None = None,
        name: str = "",
        release: bool = False,
    ) -> list[Hidden]:
        """Visits all blocks in order.

        Args:
            inputs ([`BlockInputs`]): every stream begins with its hidden states.
            streams (`int`): how many there are.
            visit: block index, block, its calls, every stream -> every stream behind the block.
            label (`str`, *optional*): what the progress bar says; None shows none.
            kept (`dict`, *optional*): what `visit` measures, recorded with the streams.
            name (`str`):
                If given, it is recorded every now and then how far the run has come, and an interrupted run of that
                name goes on from there.
            release (`bool`): whether nobody else needs the first block's inputs.

        Returns:
            `list`: every stream behind the last block.
        """
        start, hidden = 0, [inputs.hidden] * streams
        records = bool(name) and self.processes.count == 1
        if records and (found := recall_sweep(self.journal, name, inputs.hidden)):
            start, hidden, measured = found
            kept.update(measured)
        if release:
            inputs.hidden = []
        quiet = label is None or self.processes.rank > 0
        for index in logging.tqdm(range(len(inputs.calls)), desc=label, unit="block", leave=False, disable=quiet):
            if index < start:
                continue
            with self.loader.loaded(index) as block:
                hidden = self._within_budget(visit(index, block, inputs.calls[index], hidden))
            if records and self.journal.keeps and time.monotonic() - self._recorded_at > RECORD_EVERY:
                record_sweep(self.journal, name, index + 1, hidden, kept)
                self._recorded_at = time.monotonic()
        return hidden

    def replay(
        self,
        block: Block,
        hidden: Hidden,
        calls: Sequence[Call],
        record: type[SquaredNorms] | None = SquaredNorms,
        skipped: Sequence[Projection] = (),
    ) -> tuple[Hidden, Norms]:
        """Runs a block on every batch and counts it; what is recorded of its inputs and what it skips: [`replay`]."""
        self.block_forwards += sum(len(states) for states in hidden)
        if record is None and block.experts:  # experts always run as while recorded: by sequence, whatever the batch
            record = SquaredNorms
        return replay(block, hidden, calls, record, skipped)

    def inputs_of(
        self, block: Block, hidden: Hidden, calls: Sequence[Call], record: type[SquaredNorms] | None = None
    ) -> Norms:
        """What the dense block's projections receive on these hidden states, gathered as the saliency wants it."""
        skipped = self.output_projections(block)
        return self.replay(block, hidden, calls, record or self.saliency.statistic, skipped)[1]

    def output_projections(self, block: Block) -> list[Projection]:
        """What only feeds the block's output (an eighth of a Llama's work), skipped where norms are all we want."""
        return [p for p in block.projections.values() if self.decoder.feeds_next_block(block, p)]

    def activations(self, block: Block, norms: Norms) -> dict[str, torch.Tensor]:
        """Activation of every pruned projection of a block, see [`projection_activations`]."""
        return projection_activations(block, norms, self.min_expert_tokens)[0]

    def score(self, projection: Projection, activations: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Saliency of a projection's weights: float32, shape (out, in)."""
        return self.saliency.score(projection.weight.float(), activations.get(projection.name))

    def mask_of(self, projection: Projection, score: torch.Tensor, plan: SparsityPlan) -> torch.Tensor:
        """The mask that a plan, or the pattern, makes of a projection's saliency."""
        if self.pattern is not None:
            return prune_columns(score, self.pattern)
        return prune_rows(score, plan.row_counts(projection.name, projection.shape))

    def updated(self, projection: Projection, norms: Norms, activation: torch.Tensor, plan: SparsityPlan):
        """A projection's sparse weight, shape (out, in), for a saliency that updates weights."""
        enough = projection.expert is None or norms[projection.name].tokens >= self.min_expert_tokens
        hessian = norms[projection.name].hessian if enough else torch.diag(activation.square())
        sparsity = plan.sparsity[projection.name]
        weight = self.saliency.prune(projection.weight.float(), hessian, sparsity, self.pattern, projection.name)
        return weight.to(projection.weight.dtype)

    def changes(
        self, block: Block, norms: Norms, plans: Sequence[SparsityPlan], updates: bool = True
    ) -> list[ChangeOf]:
        """For every plan, what it makes of a projection; only one of these exists at a time.

        Without `updates`, a saliency that updates weights prunes by its score alone.

        The weights of a row are ranked once for all plans. What is kept of the ranking is where each plan cuts it.
        """
        activations = self.activations(block, norms)
        if self.saliency.updates_weights and updates:
            return [
                lambda projection, plan=plan: NewWeight(
                    self.updated(projection, norms, activations[projection.name], plan)
                )
                for plan in plans
            ]
        if len(plans) == 1 or self.pattern is not None:
            return [
                lambda projection, plan=plan: Zeros(
                    self.mask_of(projection, self.score(projection, activations), plan)
                )
                for plan in plans
            ]
        cuts: dict[str, list[Cut]] = {}
        for projection in block.pruned:
            ranked = sort_rows(self.score(projection, activations))
            counts = (plan.row_counts(projection.name, projection.shape) for plan in plans)
            cuts[projection.name] = [find_cut(ranked, count) for count in counts]

        def change_of(index: int) -> ChangeOf:
            return lambda projection: Zeros(
                apply_cut(self.score(projection, activations), cuts[projection.name][index])
            )

        return [change_of(index) for index in range(len(plans))]

    def once(
        self,
        plans: Sequence[SparsityPlan],
        asked: tuple,
        measure: Callable[[str], tuple[Any, dict[str, torch.Tensor]]],
    ) -> tuple[Any, dict[str, torch.Tensor]]:
        """What a step measures, recorded or measured now: a JSON value and tensors.

        Recorded under what was asked of it, since another number of processes or weights on disk ask otherwise.
        """
        if not self.journal.keeps and self.processes.count == 1:
            return measure("")
        digest = hashlib.sha256(repr(asked).encode())
        for name, value in (item for plan in plans for item in plan.sparsity.items()):
            digest.update(name.encode() + torch.as_tensor(value, dtype=torch.float64).numpy().tobytes())
        name = f"step-{digest.hexdigest()[:16]}"
        found = self.recorded(name, partial(measure, f"{name}-unfinished"))
        self.journal.drop(f"{name}-unfinished")
        return found

    def recorded(self, name: str, make: Callable[[], tuple[Any, dict[str, torch.Tensor]]]):
        """What was recorded under a name, or is made now and recorded; the same in all processes."""
        found = self.processes.from_first(self.journal.get(name))
        if found is None:
            found = make()
            if self.processes.rank == 0:
                self.journal.put(name, *found)
        return found

    def total(self, per_block: list[torch.Tensor]) -> float:
        """Sum of what was measured block by block. Raises `ValueError` if it is not finite."""
        errors = torch.stack([error.cpu() for error in per_block])  # blocks may lie on several devices
        if not bool(torch.isfinite(errors).all()):
            block = self.decoder.blocks[int((~torch.isfinite(errors)).nonzero()[0])]
            raise ValueError(f"Activations in {block.name} are not finite: they overflow in the model's dtype.")
        return errors.sum().item()

    def _within_budget(self, streams: list[Hidden]) -> list[Hidden]:
        """The same hidden states, in CPU memory if they are more than `max_hidden_bytes`."""
        if self.max_hidden_bytes is None or hidden_bytes(streams) <= self.max_hidden_bytes:
            return streams
        moved: dict[int, torch.Tensor] = {}
        for states in (states for stream in streams for states in stream):
            if id(states) not in moved:
                moved[id(states)] = to_device(states, torch.device("cpu"))
        lists: dict[int, Hidden] = {}  # streams that are the same stay so
        return [lists.setdefault(id(stream), [moved[id(states)] for states in stream]) for stream in streams]


def final_norms(final_norm: nn.Module | None, hidden: Hidden) -> SquaredNorms:
    """Squared norms of the last block's output as the final norm leaves it."""
    norms = SquaredNorms()
    for states in hidden:
        norms.update(states if final_norm is None else final_norm(states), len(states))
    return norms
