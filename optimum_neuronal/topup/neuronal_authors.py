"""Plans as the code of NeuronAL's authors makes them: bounds, rounding and rows differ from the paper's.

Their code also ran the baselines of the paper. Masks depend on the last bit of these numbers, so the order of operations
is that of their numpy code.
"""

from collections.abc import Sequence

import numpy as np
import torch

from ..blocks.statistics import SquaredNorms
from ..model.projections import Block, Decoder, Projection
from ..saliency.plan import SparsityPlan
from ..trials import Trials
from ..trials.alignment import Deviation
from .base import LARGEST, SMALLEST, plan_of_blocks, pruned_blocks, rise


BASELINE_VARIANTS = ("corrected", "authors")


class RunningNorms(SquaredNorms):
    """Squared norms as the authors round them: squares of norms, and a running mean over sequences in float32.

    `value` is the mean, shape (1, in).
    """

    def update(self, inputs: torch.Tensor, sequences: int) -> None:
        features = inputs.reshape(sequences, -1, inputs.shape[-1]).float().transpose(1, 2)
        self.tokens += sequences * features.shape[2]
        self._values.append(torch.stack([torch.norm(sequence, p=2, dim=1) ** 2 for sequence in features]))

    @property
    def value(self) -> torch.Tensor:
        values = super().value
        mean = torch.zeros_like(values[0])
        for count, squares in enumerate(values):
            mean = mean * (count / (count + 1)) + squares / (count + 1)
        return mean[None]


def block_plan(decoder: Decoder, sparsity: float, lam: float, schedule: str) -> SparsityPlan:
    """Return the plan with one sparsity per block, not rounded."""
    last = max(len(decoder.blocks) - 1, 1)
    rises = np.round(last * rise(decoder, schedule).numpy(), 12)  # 0, 1, 2, ... if linear
    values = (len(decoder.blocks) - rises) * (2 * lam / last)
    values = values - values.min()
    found = _bounded(1 - (values - np.mean(values) + (1 - sparsity)))
    return SparsityPlan({name: s for block, s in zip(decoder.blocks, found.tolist()) for name in block.pruned_names})


def _bounded(sparsities: np.ndarray) -> np.ndarray:
    """Return sparsities without those outside (0, 1). Their mean moves."""
    return np.where(sparsities <= 0, SMALLEST, np.where(sparsities >= 1, LARGEST, sparsities))


def spread_over_blocks(trials: Trials, sparsity: float, lam: float, values: torch.Tensor) -> SparsityPlan:
    """Return the plan in which blocks with large values are pruned less, all blocks counting alike."""
    found = values.numpy()
    density = (found - found.min()) * (1 / (np.ptp(found) or 1) * lam * 2)
    targets = torch.from_numpy(_bounded(1 - (density - np.mean(density) + (1 - sparsity))))
    return floored(trials, plan_of_blocks(pruned_blocks(trials.decoder), targets))


def floored(trials: Trials, plan: SparsityPlan) -> SparsityPlan:
    """Return the plan that prunes `int(in * sparsity)` weights of every row, unless the saliency updates weights."""
    if trials.saliency.updates_weights:
        return plan
    widths = {name: projection.shape[1] for name, projection in trials.decoder.projections.items()}
    return SparsityPlan({name: int(widths[name] * share) / widths[name] for name, share in plan.sparsity.items()})


def row_plans(
    decoder: Decoder, base: SparsityPlan, lambdas: Sequence[float], deviation: Deviation
) -> list[SparsityPlan]:
    """Spread the base plan's sparsity over rows: in all blocks but the last, where rows feed a place in their block."""
    plans: list[dict[str, torch.Tensor]] = [{} for _ in lambdas]
    for block in decoder.blocks:
        for projection in block.pruned:
            values = _values(decoder, block, projection, deviation)
            for plan, lam in zip(plans, lambdas):
                plan[projection.name] = _rows(projection.shape, base.sparsity[projection.name], lam, values)
    return [SparsityPlan(plan, keeps_first=True) for plan in plans]


def _values(decoder: Decoder, block: Block, projection: Projection, deviation: Deviation) -> np.ndarray:
    """Return `a_D - a_S` where the rows feed, shape (features,); zero where they stay alike."""
    place = decoder.place_fed_by(block, projection)
    if place is None or place.name == block.name or block is decoder.blocks[-1]:
        return np.zeros(1)
    return deviation.places[place.name].numpy()


def _rows(shape: tuple[int, int], sparsity: float, lam: float, values: np.ndarray) -> torch.Tensor:
    """Return the sparsity of every row, rounded up: `int(in * (1 - s))` weights stay.

    Rows of q, k and v, and of fused projections, take the values in order: the first ones, or all of them repeatedly.
    """
    spread = np.zeros_like(values)
    if np.ptp(values) > 0:
        spread = (values - values.min()) / (values.max() - values.min()) * lam * 2
    density = np.resize(spread - (np.mean(spread) - (1 - sparsity)), shape[0])
    kept = ((1 - np.clip(1 - density, SMALLEST, LARGEST)) * shape[1]).astype(np.int64)
    return torch.from_numpy((shape[1] - kept) / shape[1])
