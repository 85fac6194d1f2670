"""The questions that top-ups may ask of a model before it is pruned."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..blocks.calls import Call, Streams
from ..blocks.statistics import Norms, SquaredNorms
from ..files.records import Finding
from ..model.projections import Block, Decoder
from ..saliency import Saliency
from ..saliency.plan import Plan, SparsityPlan
from .alignment import Deviation, alignment_errors, find_deviation
from .applier import not_finite
from .engine import Engine
from .levels import Levels, level_sparsities
from .output_errors import output_errors
from .reconstruction import reconstruction_errors
from .solved import Solved, SolvedWeights
from .solved_rates import SolvedRates


Score = Callable[[Block, dict[str, torch.Tensor]], list[float]]


class Sweep:
    """The questions of top-ups in one place. No weight is changed.

    Args:
        engine ([`Engine`]): runs the model. A top-up that makes runs of its own takes them from here.
    """

    def __init__(self, engine: Engine):
        self.engine = engine

    @property
    def decoder(self) -> Decoder:
        """The model's blocks and projections."""
        return self.engine.decoder

    @property
    def saliency(self) -> Saliency:
        """The method that scores or solves weights."""
        return self.engine.saliency

    @property
    def can_abandon(self) -> bool:
        """True if running one candidate before the others is worth its extra pass over the weights."""
        return not self.engine.runner.loader.streams and self.engine.processes.count == 1

    def solve_levels(self, target: float) -> Levels:
        """Return weights that are solved at a few sparsities around a target, by a saliency that updates weights."""
        return self.solve(Levels(level_sparsities(target)))

    def solve_rates(self, *bits: int) -> SolvedRates:
        """Return weights that are quantised to so many bits, ascending, by a saliency that quantises."""
        return self.solve(SolvedRates(bits))

    def solve(self, wanted: Solved) -> Solved:
        """Return weights that are solved at a few amounts: see [`solve_weights`]."""
        return self.engine.solve(wanted)

    def dense_norms(self) -> list[Norms]:
        """Return squared norms of the dense model's own inputs over the alignment sequences, block by block."""
        return self.engine.dense().norms

    def alignment_errors(
        self,
        plans: Sequence[SparsityPlan],
        reference: str,
        scope: str,
        metric: str,
        label: str | None,
        bound: float = math.inf,
    ) -> list[float]:
        """Return the alignment error of every plan: see [`alignment_errors`]."""
        return alignment_errors(self.engine, plans, reference, scope, metric, label, bound)

    def output_errors(
        self,
        plans: Sequence[Plan],
        metric: str,
        label: str | None,
        reference: str | SparsityPlan | SolvedWeights = "dense",
        sequences: int | None = None,
    ) -> list[float]:
        """Return the error of every plan's next-token distributions: see [`output_errors`]."""
        return output_errors(self.engine, plans, metric, label, reference, sequences)

    def reconstruction_errors(self, plans: Sequence[SparsityPlan], reference: str, label: str | None) -> list[float]:
        """Return the change of every plan's outputs for equal inputs: see [`reconstruction_errors`]."""
        return reconstruction_errors(self.engine, plans, reference, label)

    def own_runs(self, question: tuple, run: Callable[[Engine], Finding]) -> Any:
        """Return the value that a top-up finds by runs of its own. It is recorded.

        Args:
            question (`tuple`): all that the finding depends on.
            run: returns the finding.
        """
        engine = self.engine
        return engine.processes.from_first(engine.measured([], question, lambda: run(engine)))[0]

    def weight_scores(self, score: Callable[[Block], list], label: str) -> list[list]:
        """Return numbers for every dense block, from its weights alone.

        Args:
            score: a block, with its weights at hand -> numbers.
            label (`str`): of the progress bar, and of the record.
        """
        records, runner = self.engine.records, self.engine.runner
        return records.recorded(
            label.lower(), lambda: (runner.for_each_block(lambda _, block: score(block), label), {})
        )[0]

    def deviation(self, plan: SparsityPlan, reference: str, scope: str, metric: str, label: str | None) -> Deviation:
        """Return the deviation of a plan's activations from the dense model's: see [`find_deviation`]."""
        return find_deviation(self.engine, plan, reference, scope, metric, label)

    def row_saliency(self, plan: SparsityPlan, label: str | None) -> dict[str, torch.Tensor]:
        """Return the sum of the saliency of every row's weights on a plan's own stream.

        Returns:
            `dict[str, Tensor]`: projection name -> float64 on the CPU, shape (out,).

        Raises:
            `ValueError`: a saliency is not finite.
        """
        engine = self.engine

        def measure() -> tuple[None, dict[str, torch.Tensor]]:
            rows: dict[str, torch.Tensor] = {}
            norms, _ = engine.stream_of(plan)

            def add(index: int, block: Block) -> None:
                activations, _ = engine.applier.activations(block, norms[index])
                for projection in block.pruned:
                    score = engine.applier.score(projection, activations)
                    rows[projection.name] = score.double().sum(dim=1).cpu()
                    if not bool(torch.isfinite(rows[projection.name]).all()):
                        raise not_finite(projection.name)

            engine.runner.for_each_block(add)
            return None, rows

        return engine.processes.from_first(engine.measured([plan], ("row saliency", label), measure))[1]

    def dense_scores(self, score: Score, label: str) -> list[list[float]]:
        """Return numbers for every dense block, from one pass of the dense model over all calibration sequences.

        Args:
            score: a block, with its weights at hand, and the activations of its pruned projections -> numbers.
            label (`str`): of the progress bar, and of the record.
        """
        engine = self.engine

        def measure() -> tuple[list[list[float]], dict]:
            scores: list[list[float]] = []

            def visit(index: int, block: Block, calls: Sequence[Call], streams: Streams) -> Streams:
                output, norms = engine.runner.replay(block, streams[0], calls)
                scores.append(score(block, engine.applier.activations(block, engine.joined(norms, SquaredNorms))[0]))
                return [output]

            engine.runner.run(engine.capture_all(SquaredNorms), 1, visit, label, release=True)
            return scores, {}

        name = f"scores-{label.lower().replace(' ', '-')}"
        return engine.cache.get(name, lambda: engine.records.recorded(name, measure)[0])
