"""The object that measures what plans would do to a model, and the base of the questions that it answers."""

import hashlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, ClassVar

import torch

from ..blocks.block_inputs import BlockInputs, Call, Stream, Streams
from ..blocks.runner import BlockRunner
from ..blocks.statistics import Norms, SquaredNorms
from ..common.processes import Processes
from ..files.records import Finding, Records
from ..model.change import Change, Zeros
from ..model.projections import Block, ChangeOf, Decoder, Projection, trial_weights
from ..saliency import Inputs, Saliency
from ..saliency.base import check_finite, mask_of
from ..saliency.plan import ColumnPattern, Cut, Plan, apply_cut, find_cut, row_counts, sort_rows


class Cache:
    """Measurements that are made once. A `lasting` cache is shared by several pruning runs of one model.

    `saved` holds the seconds, by key, that the present run would need for what it got from earlier runs.
    """

    def __init__(self, lasting: bool = False):
        self._lasting = lasting
        self._values: dict[Hashable, Any] = {}
        self._seconds: dict[Hashable, float] = {}  # in which each value was made by an earlier run
        self._latest: tuple[Any, Any] = (None, None)
        self.saved: dict[Hashable, float] = {}

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        if key not in self._values:
            start = time.perf_counter()
            self._values[key] = make()
            self._seconds[key] = time.perf_counter() - start
            self.saved[key] = 0.0
        self.saved.setdefault(key, self._seconds[key])
        return self._values[key]

    def once(self, key: Hashable, call: Callable[[], Any]) -> None:
        """Call a function, unless it was called for this key before and raised nothing. Its time is not that of a method."""
        if key not in self._values:
            self._values[key] = call()

    def latest(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return the value of an object. Only the latest is kept."""
        if self._latest[0] is not key:
            self._latest = key, make()
        return self._latest[1]

    def release(self) -> None:
        """Drop the latest value, and all others unless the cache is lasting."""
        self._latest = None, None
        if not self._lasting:
            self._values.clear()


@dataclass(frozen=True)
class Measurement(ABC):
    """A measurement about plans, or about the dense model. A subclass is a frozen dataclass; its fields name the record.

    Class attributes:
        shares_plans (`bool`): True if the answer is one number per plan, so that processes can share the plans.
    """

    shares_plans: ClassVar[bool] = False

    @abstractmethod
    def measure(self, evaluator: "PlanEvaluator", plans: Sequence[Plan]) -> Finding:
        """Measure the answer: a JSON value, and tensors by name."""

    def result(self, value: Any, tensors: dict[str, torch.Tensor]) -> Any:
        """Return the answer that top-ups get, from what was measured or recorded."""
        return value

    def record_name(self, plans: Sequence[Plan]) -> str:
        values = [getattr(self, entry.name) for entry in fields(self) if entry.compare]
        named = [value.key() if isinstance(value, Plan) else value for value in values]
        digest = hashlib.sha256(repr((type(self).__name__, *named)).encode())
        for plan in plans:
            digest.update(plan.key())
        return f"step-{digest.hexdigest()[:16]}"


@dataclass(frozen=True, eq=False, kw_only=True)
class PlanEvaluator:
    """Measures candidate plans on a model and its calibration sequences, without changing a weight. Top-ups receive it.

    Args:
        runner ([`BlockRunner`]): runs the blocks.
        saliency ([`Saliency`]): scores or solves weights.
        ids (`Tensor` of int64, shape (sequences, tokens)): all calibration sequences.
        num_alignment_samples (`int`): how many of the first sequences are alignment sequences, which measure plans.
        pattern ([`ColumnPattern`], *optional*): N:M pattern of the zeros.
        min_expert_tokens (`int`): tokens that an expert needs for activations of its own.
        records ([`Records`], *optional*): of finished steps and blocks.
        cache ([`Cache`], *optional*): may be shared by evaluators of the same model and sequences.
        norms (`type[SquaredNorms]`): how activations are summed, for alignment errors, deviations and the final pass.
    """

    runner: BlockRunner
    saliency: Saliency
    ids: torch.Tensor
    num_alignment_samples: int
    pattern: ColumnPattern | None = None
    min_expert_tokens: int = 1
    records: Records = field(default_factory=Records)
    cache: Cache = field(default_factory=Cache)
    norms: type[SquaredNorms] = SquaredNorms

    @property
    def decoder(self) -> Decoder:
        """The model's blocks and projections."""
        return self.runner.decoder

    @property
    def alignment_ids(self) -> torch.Tensor:
        """The alignment sequences: int64, shape (num_alignment_samples, tokens)."""
        return self.ids[: self.num_alignment_samples]

    @property
    def processes(self) -> Processes:
        """The processes that share the work."""
        return self.records.processes

    @property
    def statistic(self) -> type[SquaredNorms]:
        """The statistic of dense inputs: the saliency's, or `norms` if that needs only squared norms."""
        return self.norms if self.saliency.statistic is SquaredNorms else self.saliency.statistic

    @property
    def can_abandon(self) -> bool:
        """True if measuring one candidate before the others is worth an extra pass over the weights."""
        return self.runner.loader is None and self.processes.count == 1

    def measure(self, measurement: Measurement, plans: Sequence[Plan] = ()) -> Any:
        """Return the answer to a measurement: recorded, or measured and then recorded.

        Processes share the plans if the measurement allows it. Otherwise each measures, and all take the first one's answer.
        """
        name, processes = measurement.record_name(plans), self.processes
        finding = processes.from_first(self.records.get(name))
        if finding is None:
            share = processes.deal(plans) if measurement.shares_plans else plans
            value, tensors = measurement.measure(self, share) if share or not plans else ([], {})
            finding = (processes.collect(value) if measurement.shares_plans else value), tensors
            self.records.put(name, *finding)
        return measurement.result(*processes.from_first(finding))

    def measure_once(self, measurement: Measurement) -> Any:
        """Return the answer to a measurement about the dense model, which all runs that share the cache have in common."""
        return self.cache.get(measurement.record_name(()), lambda: self.measure(measurement))

    def inputs(self, block: Block, norms: Norms) -> Inputs:
        """Return what a block's pruned projections receive. Raise `ValueError` if an activation is not finite."""
        inputs = Inputs.of(block.pruned, norms, self.min_expert_tokens)
        check_finite({name: torch.isfinite(values).all() for name, values in inputs.activations.items()})
        return inputs

    def changes(self, block: Block, norms: Norms, plans: Sequence[Plan], updates: bool = True) -> list[ChangeOf]:
        """Return a function for every plan: projection -> change. Few changes exist at a time.

        Rows are ranked once for all plans. If `updates` is False, even a weight-updating saliency prunes by its score.
        """
        inputs = Inputs.of(block.pruned, norms, self.min_expert_tokens)
        saliency, pattern = self.saliency, self.pattern
        if saliency.updates_weights and updates:
            return [partial(self._solve, block, inputs, plan, {}) for plan in plans]
        if len(plans) == 1 or pattern is not None:
            score_of = partial(saliency.score_of, inputs=inputs)
            return [lambda p, plan=plan: Zeros(mask_of(p, score_of(p), plan, pattern)) for plan in plans]
        cuts: dict[str, list[Cut]] = {}  # of every projection by plan; sorted rows would take more memory
        for p in block.pruned:
            ranked = sort_rows(saliency.score_of(p, inputs))
            cuts[p.name] = [find_cut(ranked, row_counts(plan.sparsity[p.name], p.shape)) for plan in plans]

        def zeros(p: Projection, index: int) -> Zeros:
            return Zeros(apply_cut(saliency.score_of(p, inputs), cuts[p.name][index], plans[index].keeps_first))

        return [partial(zeros, index=index) for index in range(len(plans))]

    def _solve(self, block: Block, inputs: Inputs, plan: Plan, solved: dict[str, Change], p: Projection) -> Change:
        """Return the change of a projection. Those of others with its input wait in `solved` if that costs less."""
        if p.name not in solved:
            alike = self.saliency.solves_alike
            readers = [q for q in block.pruned if alike and inputs.statistics[q.name] is inputs.statistics[p.name]]
            solved.update(self.saliency.changes(readers or [p], inputs, plan, self.pattern))
        return solved.pop(p.name)

    def alignment_inputs(self) -> BlockInputs:
        """Return the inputs of the blocks for the alignment sequences, cached."""
        key = ("inputs", self.runner.batch_size)
        return self.cache.get(key, partial(self.runner.capture, self.alignment_ids))

    def dense(self, statistic: type[SquaredNorms] | None = None) -> tuple[list[Norms], Stream]:
        """Return a statistic of all inputs in the dense model, and the last block's output, cached.

        Default: the saliency's statistic.
        """
        statistic = statistic or self.statistic
        return self.cache.get(("dense", statistic, self.runner.batch_size), lambda: self._run_stream(statistic))

    def stream_of(self, plan: Plan) -> tuple[list[Norms], Stream]:
        """Run a plan's blocks, pruned by score alone. Return the norms of each dense block's inputs, and the last output.

        The result for the latest plan is cached.
        """
        return self.cache.latest(plan, lambda: self._run_stream(SquaredNorms, plan))

    def _run_stream(self, statistic: type[SquaredNorms], plan: Plan | None = None) -> tuple[list[Norms], Stream]:
        """Run the dense model on the alignment sequences, or a plan's blocks, pruned by score alone."""
        runner, by_block = self.runner, []

        def visit(index: int, block: Block, calls: Sequence[Call], streams: Streams) -> Streams:
            if plan is None:
                output, norms = runner.replay(block, streams[0], calls, statistic)
            else:
                norms = runner.inputs_of(block, streams[0], calls, statistic)
                (change_of,) = self.changes(block, norms, [plan], updates=False)
                with trial_weights(block.pruned, change_of):
                    output = runner.output(block, streams[0], calls)
            by_block.append(norms)
            return [output]

        (output,) = runner.run(self.alignment_inputs(), 1, visit)
        return by_block, output

    def capture_all(self, statistic: type[SquaredNorms], batch_size: int | None = None) -> BlockInputs:
        """Return the inputs of the blocks for all calibration sequences, or for this process's share of them."""
        ids = self.ids
        return self.runner.capture(ids[self.processes.part(len(ids))] if self._splits(statistic) else ids, batch_size)

    def joined(self, norms: Norms, statistic: type[SquaredNorms]) -> Norms:
        """Return the norms over the sequences of all processes, in their order."""
        if not self._splits(statistic):
            return norms
        joined: dict[SquaredNorms, SquaredNorms] = {}
        for norm in norms.values():
            if norm not in joined:
                tokens = sum(self.processes.collect([norm.tokens]))
                joined[norm] = SquaredNorms([self.processes.join(norm.value)], tokens)
        return {name: joined[norm] for name, norm in norms.items()}

    def _splits(self, statistic: type[SquaredNorms]) -> bool:
        """Return True if the processes share the sequences. Sums of other statistics would depend on their number."""
        return statistic is SquaredNorms and self.processes.splits(len(self.ids))
