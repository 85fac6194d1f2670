"""Scores of the dense model's blocks and rows, for top-ups that compare no candidates."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..blocks.block_inputs import Call, Streams
from ..blocks.statistics import SquaredNorms
from ..files.records import Finding
from ..model.projections import Block
from ..saliency.base import check_finite
from ..saliency.plan import Plan
from .trials import Question, Trials


@dataclass(frozen=True)
class WeightScores(Question):
    """The score of every block, from its dense weights: a JSON value each.

    `label` is the record's key, and the progress bar's: use one per score function.
    """

    label: str
    score: Callable[[Block], Any] = field(compare=False)

    def measure(self, trials: Trials, plans: Sequence[Plan]) -> Finding:
        return trials.runner.for_each_block(lambda _, block: self.score(block), self.label), {}


@dataclass(frozen=True)
class ActivationScores(Question):
    """The score of every block with pruned projections, from its dense weights and their activations, (in,) each.

    The activations are of all calibration sequences. `label` is the record's key, and the progress bar's: use one per score
    function.
    """

    label: str
    score: Callable[[Block, dict[str, torch.Tensor]], Any] = field(compare=False)

    def measure(self, trials: Trials, plans: Sequence[Plan]) -> Finding:
        scores = []

        def visit(index: int, block: Block, calls: Sequence[Call], streams: Streams) -> Streams:
            output, norms = trials.runner.replay(block, streams[0], calls)
            if block.pruned:
                scores.append(self.score(block, trials.inputs(block, trials.joined(norms, SquaredNorms)).activations))
            return [output]

        trials.runner.run(trials.capture_all(SquaredNorms), 1, visit, self.label, release=True)
        return scores, {}


@dataclass(frozen=True)
class RowSaliency(Question):
    """The sum of every row's saliency on one plan's own stream: name -> float64, shape (out,)."""

    def answer(self, value: None, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return tensors

    def measure(self, trials: Trials, plans: Sequence[Plan]) -> Finding:
        rows: dict[str, torch.Tensor] = {}
        norms, _ = trials.stream_of(*plans)

        def add(index: int, block: Block) -> None:
            inputs = trials.inputs(block, norms[index])
            for projection in block.pruned:
                score = trials.saliency.score_of(projection, inputs)
                rows[projection.name] = score.double().sum(dim=1).cpu()

        trials.runner.for_each_block(add)
        check_finite({name: torch.isfinite(values).all() for name, values in rows.items()})
        return None, rows
