"""A model and its calibration sequences, with the parts that measure what a plan would do to it."""

import hashlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..blocks.block_inputs import BlockInputs
from ..blocks.calls import Call, Stream, Streams
from ..blocks.runner import BlockRunner
from ..blocks.statistics import Norms, SquaredNorms
from ..common.processes import Processes
from ..files.records import Finding, Records
from ..model.projections import Block, Decoder, trial_weights
from ..saliency import Saliency
from ..saliency.plan import Plan, SparsityPlan
from .applier import PlanApplier
from .solved import Solved, heldout_sequences, solve_weights


REFERENCES = ("sparse-stream", "dense")


class Cache:
    """Measurements that are asked for again: hidden states, dense activations, scores, the stream of a plan.

    Args:
        lasting (`bool`): True if prunes of the same model and sequences share it, so that it is not cleared between them.
    """

    def __init__(self, lasting: bool = False):
        self._lasting = lasting
        self._found: dict[Hashable, Any] = {}
        self._latest: tuple[Any, Any] = (None, None)

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return the value of a key. It is made once."""
        if key not in self._found:
            self._found[key] = make()
        return self._found[key]

    def latest(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return the value of an object, made anew unless the last call was for this object."""
        if self._latest[0] is not key:
            self._latest = key, make()
        return self._latest[1]

    def release(self) -> None:
        """Drop the latest value, and all others unless they are shared."""
        self._latest = None, None
        if not self._lasting:
            self._found.clear()


@dataclass(frozen=True)
class DenseStream:
    """The dense model's pass over the alignment sequences.

    Args:
        norms (`list[Mapping[str, SquaredNorms]]`): inputs of every block's projections.
        final ([`SquaredNorms`]): the last block's output behind the final norm.
        output ([`Stream`]): the last block's output.
    """

    norms: list[Norms]
    final: SquaredNorms
    output: Stream


@dataclass(frozen=True, eq=False)
class Engine:
    """The parts that trials and the final pruning are made of.

    Args:
        runner ([`BlockRunner`]): runs the blocks.
        applier ([`PlanApplier`]): makes plans into changes of weights.
        ids (`Tensor` of int64, shape (sequences, tokens)): all calibration sequences.
        num_alignment_samples (`int`): the first so many of them are the alignment sequences, which trials run on.
        records ([`Records`], *optional*): of finished steps and blocks.
        cache ([`Cache`], *optional*): engines for the same model and sequences may share one.
    """

    runner: BlockRunner
    applier: PlanApplier
    ids: torch.Tensor
    num_alignment_samples: int
    records: Records = field(default_factory=Records)
    cache: Cache = field(default_factory=Cache)

    @property
    def alignment_ids(self) -> torch.Tensor:
        """The alignment sequences: int64, shape (num_alignment_samples, tokens)."""
        return self.ids[: self.num_alignment_samples]

    @property
    def decoder(self) -> Decoder:
        """The model's blocks and projections."""
        return self.runner.decoder

    @property
    def saliency(self) -> Saliency:
        """The method that scores or solves weights."""
        return self.applier.saliency

    @property
    def processes(self) -> Processes:
        """The processes that share the work."""
        return self.records.processes

    def check_replay(self) -> None:
        """Raise `ValueError` unless replaying the blocks gives the model's own output."""
        self.runner.check_replay(self.ids[:1])

    def measured(self, plans: Sequence[Plan], question: tuple, measure: Callable[[], Finding]) -> Finding:
        """Return the finding of a step, recorded or measured now.

        Args:
            plans (`Sequence[Plan]`), question (`tuple`): all that the finding depends on. They name the record.
            measure: returns the finding.
        """
        if not self.records.keeps and self.processes.count == 1:
            return measure()
        digest = hashlib.sha256(repr(question).encode())
        for plan in plans:
            for name in plan.amounts:
                digest.update(name.encode() + plan.key([name]))
        return self.records.recorded(f"step-{digest.hexdigest()[:16]}", measure)

    def alignment_inputs(self) -> BlockInputs:
        """Return the calls of the blocks for the alignment sequences. They are cached."""
        key = ("inputs", self.runner.batch_size)
        return self.cache.get(key, lambda: self.runner.capture(self.alignment_ids))

    def dense(self, statistic: type[SquaredNorms] | None = None) -> DenseStream:
        """Return the dense model's own stream. It is cached.

        Args:
            statistic (`type[SquaredNorms]`, *optional*): of all inputs. None: the saliency's.
        """
        statistic = statistic or self.saliency.statistic
        return self.cache.get(("dense", statistic, self.runner.batch_size), lambda: self._run_dense(statistic))

    def _run_dense(self, statistic: type[SquaredNorms]) -> DenseStream:
        per_block: list[Norms] = []

        def visit(index: int, block: Block, calls: Sequence[Call], streams: Streams) -> Streams:
            output, norms = self.runner.replay(block, streams[0], calls, statistic)
            per_block.append(norms)
            return [output]

        inputs = self.alignment_inputs()
        (output,) = self.runner.run(inputs, 1, visit, "Dense activations")
        return DenseStream(per_block, final_norms(inputs.final_norm, output), output)

    def stream_of(self, plan: SparsityPlan) -> tuple[list[Norms], Stream]:
        """Return a plan's own stream over the alignment sequences, pruned by score alone. The latest one is cached.

        Returns:
            `tuple`: squared norms of every dense block's inputs behind the plan's sparse blocks, and the last sparse
            block's output.
        """
        return self.cache.latest(plan, lambda: self._run_plan(plan))

    def _run_plan(self, plan: SparsityPlan) -> tuple[list[Norms], Stream]:
        per_block: list[Norms] = []

        def visit(index: int, block: Block, calls: Sequence[Call], streams: Streams) -> Streams:
            per_block.append(self.runner.inputs_of(block, streams[0], calls))
            (change_of,) = self.applier.changes(block, per_block[-1], [plan], updates=False)
            with trial_weights(block.pruned, change_of):
                return [self.runner.output(block, streams[0], calls)]

        (output,) = self.runner.run(self.alignment_inputs(), 1, visit)
        return per_block, output

    def reference_norms(
        self, reference: str, index: int, block: Block, stream: Stream, calls: Sequence[Call]
    ) -> Norms:
        """Return the inputs of the dense block's projections: in the dense model, or on these hidden states."""
        if reference == "dense":
            return self.dense().norms[index]
        return self.runner.inputs_of(block, stream, calls, self.saliency.statistic)

    def solve(self, wanted: Solved) -> Solved:
        """Return weights that are solved at a few amounts: see [`solve_weights`].

        The alignment sequences take no part, if enough others are left.
        """
        inputs = self.runner.capture(self.ids[heldout_sequences(len(self.ids), len(self.alignment_ids)) :])
        return solve_weights(self.runner, self.applier, wanted, self.records, inputs)

    def capture_all(self, statistic: type[SquaredNorms], batch_size: int | None = None) -> BlockInputs:
        """Return the calls of the blocks for all calibration sequences, or for this process's share of them.

        Args:
            statistic (`type[SquaredNorms]`): measured on them, and put together by [`Engine.joined`].
            batch_size (`int`, *optional*): sequences per forward, if it may not be any other.
        """
        ids = self.ids
        return self.runner.capture(ids[self.processes.part(len(ids))] if self._shares(statistic) else ids, batch_size)

    def joined(self, norms: Norms, statistic: type[SquaredNorms]) -> Norms:
        """Return the norms over the sequences of all processes, in their order."""
        if not self._shares(statistic):
            return norms
        joined: dict[SquaredNorms, SquaredNorms] = {}
        for norm in norms.values():
            if norm not in joined:
                tokens = sum(self.processes.collect([norm.tokens]))
                joined[norm] = SquaredNorms.of(self.processes.join(norm.value, len(self.ids)), tokens)
        return {name: joined[norm] for name, norm in norms.items()}

    def _shares(self, statistic: type[SquaredNorms]) -> bool:
        """Return True if the processes share the sequences. Sums over all of them would depend on how they are shared."""
        return statistic is SquaredNorms and self.processes.shares(len(self.ids))


def final_norms(final_norm: nn.Module | None, stream: Stream) -> SquaredNorms:
    """Return squared norms of the last block's output behind the final norm."""
    norms = SquaredNorms()
    for states in stream:
        norms.update(states if final_norm is None else final_norm(states), len(states))
    return norms
