"""A model and its calibration sequences, with what is needed to measure what a plan would do to it."""

from collections.abc import Mapping

import torch

from ..engine.calls import Call
from ..engine.capture import BlockInputs
from ..engine.runner import BlockRunner
from ..engine.statistics import Norms, SquaredNorms
from ..engine.streams import Stream
from ..model.projections import Block, Decoder
from ..saliency import Saliency
from ..sparsity.plan import SparsityPlan
from ..system.processes import Processes
from .applier import PlanApplier
from .dense_pass import DenseStream, dense_stream
from .levels import LABEL as LEVELS
from .levels import Levels, heldout_sequences, level_sparsities, solve_levels
from .plan_stream import PlanStream
from .records import Kept, StepRecords


REFERENCES = ("sparse-stream", "dense")


class Engine:
    """The parts that measuring and pruning are made of, and what follows from them together.

    Args:
        runner ([`BlockRunner`]): runs the blocks.
        applier ([`PlanApplier`]): makes plans into changes of weights.
        ids (`Tensor` of int64, shape (sequences, tokens)): all calibration sequences.
        num_alignment_samples (`int`): how many of them, from the first, trials are measured on.
        records ([`StepRecords`], *optional*): what finished steps have found.
        kept ([`Kept`], *optional*): what engines for the same model and sequences find once and share.

    Attributes:
        levels ([`Levels`], *optional*): what trials take their weights from, once [`Engine.solve`] was called.
    """

    def __init__(
        self,
        runner: BlockRunner,
        applier: PlanApplier,
        ids: torch.Tensor,
        num_alignment_samples: int,
        records: StepRecords | None = None,
        kept: Kept | None = None,
    ):
        self.runner, self.applier, self.ids = runner, applier, ids
        self.alignment_ids = ids[:num_alignment_samples]
        self.records, self.kept = records or StepRecords(), kept or Kept()
        self._plan_stream = PlanStream()
        self.levels: Levels | None = None

    @property
    def decoder(self) -> Decoder:
        """The model's blocks and projections."""
        return self.runner.decoder

    @property
    def saliency(self) -> Saliency:
        """What scores weights."""
        return self.applier.saliency

    @property
    def processes(self) -> Processes:
        """With whom the work is shared."""
        return self.records.processes

    def check_replay(self) -> None:
        """Raises `ValueError` unless replaying the blocks gives what the model computes."""
        self.runner.check_replay(self.ids[:1])

    def alignment_inputs(self) -> BlockInputs:
        """What the blocks are called with for the sequences that trials are measured on. Kept."""
        key = ("inputs", self.runner.batch_size)
        return self.kept.get(key, lambda: self.runner.capture(self.alignment_ids))

    def dense(self, statistic: type[SquaredNorms] | None = None) -> DenseStream:
        """The dense model's own stream, with a statistic of all inputs: the saliency's if not given. Kept."""
        statistic = statistic or self.saliency.statistic
        return self.kept.get(
            ("dense", statistic, self.runner.batch_size),
            lambda: dense_stream(self.runner, self.alignment_inputs(), statistic),
        )

    def stream_of(self, plan: SparsityPlan) -> tuple[list[Norms], Stream]:
        """A plan's own stream over the alignment sequences, see [`PlanStream.get`]; of the last plan, kept."""
        return self._plan_stream.get(plan, self.runner, self.applier, self.alignment_inputs())

    def reference_norms(self, reference: str, index: int, block: Block, stream: Stream, calls: list[Call]) -> Norms:
        """What the dense block's projections receive: in the dense model, or on these hidden states."""
        if reference == "dense":
            return self.dense().norms[index]
        return self.runner.inputs_of(block, stream, calls, self.saliency.statistic)

    def solve_levels(self, target: float) -> None:
        """Reconstructs weights at a few sparsities around a target, see [`Engine.solve`]."""
        bits = self.applier.value_bits
        name = "levels" if bits is None else f"levels-{bits}-bits"
        self.solve(dict.fromkeys(level_sparsities(target, bits is not None), self.applier), name)

    def solve(self, solvers: Mapping[float, PlanApplier], name: str = "levels", label: str = LEVELS) -> None:
        """Makes weights of a few sparsities: trials take theirs from these from then on. Arguments: [`solve_levels`].

        The sequences that trials are measured on take no part, if others are left.
        """
        inputs = self.runner.capture(self.ids[heldout_sequences(len(self.ids), len(self.alignment_ids)) :])
        budget = self.runner.max_hidden_bytes
        self.levels = solve_levels(self.runner, solvers, self.records, inputs, budget, name, label)

    def capture_all(self, statistic: type[SquaredNorms], batch_size: int | None = None) -> BlockInputs:
        """What the blocks are called with for all calibration sequences, or for this process's share of them.

        What is measured on them is put together by [`Engine.joined`].

        Args:
            statistic (`type[SquaredNorms]`): that is.
            batch_size (`int`, *optional*): sequences per forward, if it may not be any other.
        """
        ids = self.ids
        return self.runner.capture(ids[self.processes.part(len(ids))] if self._shares(statistic) else ids, batch_size)

    def joined(self, norms: Norms, statistic: type[SquaredNorms]) -> Norms:
        """Norms over the sequences of all processes, in their order."""
        if not self._shares(statistic):
            return norms
        joined: dict[SquaredNorms, SquaredNorms] = {}
        for norm in norms.values():
            if norm not in joined:
                tokens = sum(self.processes.collect([norm.tokens]))
                joined[norm] = SquaredNorms.of(self.processes.join(norm.value, len(self.ids)), tokens)
        return {name: joined[norm] for name, norm in norms.items()}

    def release(self) -> None:
        """Lets go of what is kept for trials, before the final pruning needs the memory."""
        self.kept.release()
        self._plan_stream.release()
        self.levels = None

    def _shares(self, statistic: type[SquaredNorms]) -> bool:
        """Whether the processes share the sequences. Sums over all sequences would depend on how they are shared."""
        return statistic is SquaredNorms and self.processes.shares(len(self.ids))
