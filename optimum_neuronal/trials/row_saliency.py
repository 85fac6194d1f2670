"""The saliency of rows, for a top-up that prunes rows with a small sum more."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..files.records import Finding
from ..model.projections import Block
from ..saliency.base import check_finite
from ..saliency.plan import Plan
from .plan_evaluator import Measurement, PlanEvaluator


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
