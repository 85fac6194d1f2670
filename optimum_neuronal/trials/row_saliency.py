"""The question that the search's last stage asks: how much the rows of every projection matter in a plan's own stream."""

import torch

from ..sparsity.plan import SparsityPlan
from .applier import not_finite
from .engine import Engine


def row_saliency(engine: Engine, plan: SparsityPlan, label: str | None) -> dict[str, torch.Tensor]:
    """Sum of the saliency of every row's weights, measured on a plan's own stream.

    Returns:
        `dict[str, Tensor]`: projection name -> float64 on the CPU, shape (out,).

    Raises:
        `ValueError`: a saliency is not finite.
    """

    def measure(_) -> tuple[None, dict[str, torch.Tensor]]:
        rows: dict[str, torch.Tensor] = {}
        norms, _ = engine.stream_of(plan)
        for index in range(len(engine.decoder.blocks)):
            with engine.runner.loader.loaded(index) as block:
                activations, _ = engine.applier.activations(block, norms[index])
                for projection in block.pruned:
                    score = engine.applier.score(projection, activations)
                    rows[projection.name] = score.double().sum(dim=1).cpu()
                    if not bool(torch.isfinite(rows[projection.name]).all()):
                        raise not_finite(projection.name)
        return None, rows

    return engine.processes.from_first(engine.records.once([plan], ("row saliency", label), measure))[1]
