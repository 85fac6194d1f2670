"""Scores of the dense model's blocks, for top-ups that compare no candidates, and of the rows of a plan's weights."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..blocks.block_inputs import Call, Streams
from ..blocks.statistics import SquaredNorms
from ..files.records import Finding
from ..model.projections import Block
from ..saliency.base import check_finite
from ..saliency.plan import Plan
from .plan_evaluator import Measurement, PlanEvaluator


@dataclass(frozen=True)
class BlockScores(Measurement):
    """The score of every block with pruned projections, from its dense weights and their activations, (in,) each: JSON values.

    The activations are of all calibration sequences, and are left out unless the score `needs_inputs`. `label` is the
    record's key, and the progress bar's: use one per score function.
    """

    label: str
    score: Callable[[Block, Mapping[str, torch.Tensor]], Any] = field(compare=False)
    needs_inputs: bool = True

    def measure(self, evaluator: PlanEvaluator, plans: Sequence[Plan]) -> Finding:
        scores: list[Any] = []
        if not self.needs_inputs:
            of_all = evaluator.runner.for_each_block(lambda _, block: self.score(block, {}), self.label)
            return [score for score, block in zip(of_all, evaluator.decoder.blocks) if block.pruned], {}

        def visit(index: int, block: Block, calls: Sequence[Call], streams: Streams) -> Streams:
            output, norms = evaluator.runner.replay(block, streams[0], calls)
            if block.pruned:
                inputs = evaluator.inputs(block, evaluator.joined(norms, SquaredNorms))
                scores.append(self.score(block, inputs.activations))
            return [output]

        evaluator.runner.run(evaluator.capture_all(SquaredNorms), 1, visit, self.label, release=True)
        return scores, {}


@dataclass(frozen=True)
class RowSaliency(Measurement):
    """The sum of every row's saliency on one plan's own stream: name -> float64, shape (out,)."""

    def result(self, value: None, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return tensors

    def measure(self, evaluator: PlanEvaluator, plans: Sequence[Plan]) -> Finding:
        rows: dict[str, torch.Tensor] = {}
        norms, _ = evaluator.stream_of(*plans)

        def add(index: int, block: Block) -> None:
            inputs = evaluator.inputs(block, norms[index])
            for projection in block.pruned:
                score = evaluator.saliency.score_of(projection, inputs)
                rows[projection.name] = score.double().sum(dim=1).cpu()

        evaluator.runner.for_each_block(add)
        check_finite({name: torch.isfinite(values).all() for name, values in rows.items()})
        return None, rows
