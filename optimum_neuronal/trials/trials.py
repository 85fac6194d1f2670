"""The object that measures what plans would do to a model."""

import hashlib
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..blocks.block_inputs import BlockInputs, Call, Stream, Streams
from ..blocks.runner import BlockRunner
from ..blocks.statistics import Norms, SquaredNorms
from ..common.machine import Processes
from ..files.records import Finding, Records
from ..model.projections import Block, ChangeOf, Decoder
from ..saliency import Saliency
from ..saliency.plan import ColumnPattern, Plan, SparsityPlan
from ..saliency.prune_projections import check_finite, find_activations, score_projection, trial_changes
from .alignment import Deviation, alignment_errors, find_deviation, run_stream
from .output_errors import output_errors, reconstruction_errors


REFERENCES = ("sparse-stream", "dense")
Score = Callable[[Block, dict[str, torch.Tensor]], Any]  # the block, (in,) by projection -> a JSON value


class Cache:
    """Measurements that are made once. A `lasting` cache is shared by several prunes of one model."""

    def __init__(self, lasting: bool = False):
        self._lasting = lasting
        self._found: dict[Hashable, Any] = {}
        self._latest: tuple[Any, Any] = (None, None)

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        if key not in self._found:
            self._found[key] = make()
        return self._found[key]

    def latest(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return the value of an object. Only the latest is kept."""
        if self._latest[0] is not key:
            self._latest = key, make()
        return self._latest[1]

    def release(self) -> None:
        """Drop the latest value, and all others unless the cache is lasting."""
        self._latest = None, None
        if not self._lasting:
            self._found.clear()


@dataclass(frozen=True, eq=False)
class Trials:
    """Measures candidate plans on a model and its calibration sequences, without changing a weight. Top-ups receive it.

    Args:
        runner ([`BlockRunner`]): runs the blocks.
        saliency ([`Saliency`]): scores or solves weights.
        ids (`Tensor` of int64, shape (sequences, tokens)): all calibration sequences.
        num_alignment_samples (`int`): how many of the first sequences are alignment sequences, which measure plans.
        pattern ([`ColumnPattern`], *optional*): N:M pattern of the zeros.
        min_expert_tokens (`int`): tokens that an expert needs for activations of its own.
        records ([`Records`], *optional*): of finished steps and blocks.
        cache ([`Cache`], *optional*): may be shared by trials of the same model and sequences.
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
        """The statistic of dense inputs: the saliency's, unless any norms do."""
        return self.norms if self.saliency.statistic is SquaredNorms else self.saliency.statistic

    @property
    def can_abandon(self) -> bool:
        """True if measuring one candidate before the others is worth an extra pass over the weights."""
        return not self.runner.loader.streams and self.processes.count == 1

    def alignment_errors(
        self,
        plans: Sequence[SparsityPlan],
        reference: str,
        scope: str,
        metric: str,
        label: str | None,
        bound: float = math.inf,
    ) -> list[float]:
        """Return the alignment error of every plan, summed over all pruned projections (paper, Eq. 3).

        Args:
            plans (`Sequence[SparsityPlan]`): candidates, all measured in one run.
            reference (`str`):
                Source of dense activations and saliency. `"dense"`: the dense model. `"sparse-stream"`: the dense block
                on the plan's own hidden states.
            scope, metric (`str`): see [`alignment_error`].
            label (`str`, *optional*): of the progress bar.
            bound (`float`): plans are abandoned when their error exceeds this. Their result is infinite.
        """
        return self._shared(alignment_errors, plans, reference, scope, metric, label, bound)

    def output_errors(
        self,
        plans: Sequence[Plan],
        metric: str,
        label: str | None,
        reference: str | SparsityPlan = "dense",
        sequences: int | None = None,
    ) -> list[float]:
        """Return the error of every plan's next-token distributions, in nats per predicted token.

        Args:
            plans (`Sequence[Plan]`): candidates, all measured in one run.
            metric (`str`): `"kl"` to the dense model's distributions, or `"nll"` of the text.
            label (`str`, *optional*): of the progress bar.
            reference (`str` or [`SparsityPlan`]):
                Source of the candidates' weights: the saliency on the hidden states of the dense model (`"dense"`) or of
                one plan. With one plan, even a weight-updating saliency only prunes by score.
            sequences (`int`, *optional*): number of alignment sequences to compare. Default: all.
        """
        return self._shared(output_errors, plans, metric, label, reference, sequences)

    def reconstruction_errors(self, plans: Sequence[SparsityPlan], reference: str, label: str | None) -> list[float]:
        """Return `sum over projections of || W X - (M * W) X ||_2^2` of every plan over the alignment sequences.

        Arguments: see [`Trials.alignment_errors`].
        """
        return self._shared(reconstruction_errors, plans, reference, label)

    def deviation(
        self, plan: SparsityPlan, reference: str, scope: str, metric: str, label: str | None, kind: str = "signed"
    ) -> Deviation:
        """Return the deviation of a plan's activations from the dense model's at every place that rows feed.

        `kind` is one of `DEVIATIONS`. Other arguments: see [`Trials.alignment_errors`].
        """
        question = (reference, scope, metric, label, kind)
        return Deviation(*self.measured([plan], question, lambda: find_deviation(self, plan, *question)))

    def row_saliency(self, plan: SparsityPlan, label: str | None) -> dict[str, torch.Tensor]:
        """Return the sum of every row's saliency on a plan's own stream: name -> float64, shape (out,)."""

        def measure() -> tuple[None, dict[str, torch.Tensor]]:
            rows: dict[str, torch.Tensor] = {}
            norms, _ = self.stream_of(plan)

            def add(index: int, block: Block) -> None:
                activations = self.activations(block, norms[index])
                for projection in block.pruned:
                    score = score_projection(self.saliency, projection, activations)
                    rows[projection.name] = score.double().sum(dim=1).cpu()

            self.runner.for_each_block(add)
            check_finite({name: torch.isfinite(values).all() for name, values in rows.items()})
            return None, rows

        return self.measured([plan], ("row saliency", label), measure)[1]

    def weight_scores(self, score: Callable[[Block], list], label: str) -> list[list]:
        """Return the scores of every dense block, from its weights. The label also names the record; it is of one score."""

        def measure() -> Finding:
            return self.runner.for_each_block(lambda _, block: score(block), label), {}

        return self.cache.get(label, lambda: self.records.recorded(label.lower(), measure)[0])

    def dense_scores(self, score: Score, label: str) -> list:
        """Return the score of every block with pruned projections, from its dense weights and their activations.

        The activations are of all calibration sequences. The label also names the record; it is of one score.
        """

        def measure() -> Finding:
            scores = []

            def visit(index: int, block: Block, calls: Sequence[Call], streams: Streams) -> Streams:
                output, norms = self.runner.replay(block, streams[0], calls)
                if block.pruned:
                    scores.append(score(block, self.activations(block, self.joined(norms, SquaredNorms))))
                return [output]

            self.runner.run(self.capture_all(SquaredNorms), 1, visit, label, release=True)
            return scores, {}

        name = f"scores-{label.lower().replace(' ', '-')}"
        return self.cache.get(name, lambda: self.records.recorded(name, measure)[0])

    def measured(self, plans: Sequence[Plan], question: tuple, measure: Callable[[], Finding]) -> Finding:
        """Return a finding from the records, or measure it; in all processes that of the first.

        Plans and question name the record.
        """
        digest = hashlib.sha256(repr(question).encode())
        for plan in plans:
            digest.update(plan.key(plan.amounts))
        return self.processes.from_first(self.records.recorded(f"step-{digest.hexdigest()[:16]}", measure))

    def _shared(self, measure: Callable, plans: Sequence[Plan], *question: Any) -> list[float]:
        """Measure one number per plan. The processes share the plans."""

        def share() -> tuple[list[float], dict]:
            own = self.processes.deal(plans)
            return self.processes.collect(measure(self, own, *question) if own else []), {}

        named = [part.key(part.amounts) if isinstance(part, Plan) else part for part in question]
        return self.measured(plans, (measure.__name__, *named), share)[0]

    def activations(self, block: Block, norms: Norms) -> dict[str, torch.Tensor]:
        """Return the activations of a block's pruned projections by name, (in,)."""
        found = find_activations(block.pruned, norms, self.min_expert_tokens)[0]
        check_finite({name: torch.isfinite(values).all() for name, values in found.items()})
        return found

    def changes(self, block: Block, norms: Norms, plans: Sequence[Plan], updates: bool = True) -> list[ChangeOf]:
        """Return a function for every plan: projection -> change. See [`trial_changes`]."""
        return trial_changes(self.saliency, block, norms, plans, self.pattern, self.min_expert_tokens, updates)

    def alignment_inputs(self) -> BlockInputs:
        """Return the inputs of the blocks for the alignment sequences, cached."""
        key = ("inputs", self.runner.batch_size)
        return self.cache.get(key, lambda: self.runner.capture(self.alignment_ids))

    def dense(self, statistic: type[SquaredNorms] | None = None) -> tuple[list[Norms], Stream]:
        """Return a statistic of all inputs in the dense model, and the last block's output, cached.

        Default: the saliency's statistic.
        """
        statistic = statistic or self.statistic
        return self.cache.get(("dense", statistic, self.runner.batch_size), lambda: run_stream(self, statistic))

    def stream_of(self, plan: SparsityPlan) -> tuple[list[Norms], Stream]:
        """Return the norms of every dense block's inputs after sparse blocks, pruned by score alone, and the last output.

        Those of the latest plan are cached.
        """
        return self.cache.latest(plan, lambda: run_stream(self, SquaredNorms, plan))

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
                joined[norm] = SquaredNorms([self.processes.join(norm.value, len(self.ids))], tokens)
        return {name: joined[norm] for name, norm in norms.items()}

    def _splits(self, statistic: type[SquaredNorms]) -> bool:
        """Return True if the processes share the sequences. Sums of other statistics would depend on their number."""
        return statistic is SquaredNorms and self.processes.shares(len(self.ids))
