"""Plans as the code of NeuronAL's authors makes them: bounds, rounding and rows differ from the paper's.

Their code also ran the baselines of the paper. Masks depend on the last bit of these numbers, so the order of operations
is that of their numpy code.
"""

from collections.abc import Sequence

import numpy as np
import torch

from ..blocks.statistics import SquaredNorms
from ..model.projections import Block, Decoder
from ..saliency.plan import SparsityPlan
from ..trials import Trials
from ..trials.deviation import Deviation
from .base import LARGEST, SMALLEST, plan_of_blocks, pruned_blocks, rise, rounded, spread_over_blocks


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
    """Return the plan with one sparsity per pruned block, not rounded."""
    blocks = pruned_blocks(decoder)
    last = max(len(blocks) - 1, 1)
    rises = np.round(last * rise(len(blocks), schedule).numpy(), 12)  # 0, 1, 2, ... if linear
    values = (len(blocks) - rises) * (2 * lam / last)
    return _plan(blocks, values - values.min(), sparsity)


def _plan(blocks: Sequence[Block], density: np.ndarray, sparsity: float) -> SparsityPlan:
    """Return the plan of densities shifted to their mean, which moves again where sparsities leave (0, 1)."""
    found = 1 - (density - np.mean(density) + (1 - sparsity))
    found = np.where(found <= 0, SMALLEST, np.where(found >= 1, LARGEST, found))
    return plan_of_blocks(blocks, torch.from_numpy(found))


def spread(trials: Trials, sparsity: float, lam: float, values: torch.Tensor, variant: str) -> SparsityPlan:
    """Return the plan in which blocks with large values are pruned less. To the authors, all blocks count alike."""
    blocks, found = pruned_blocks(trials.decoder), values.numpy()
    if variant != "authors":
        return spread_over_blocks(blocks, sparsity, lam, values)
    density = (found - found.min()) * (1 / (np.ptp(found) or 1) * lam * 2)
    return rounded(trials, _plan(blocks, density, sparsity), variant)


def row_plan(decoder: Decoder, base: SparsityPlan, lam: float, deviation: Deviation) -> SparsityPlan:
    """Spread the base plan's sparsity over rows: in all blocks but the last, where rows feed a place in their block."""
    plan = {}
    for block in decoder.blocks:
        for projection in block.pruned:
            place = decoder.place_fed_by(block, projection)
            alike = place is None or place.name == block.name or block is decoder.blocks[-1]
            values = np.zeros(1) if alike else deviation.places[place.name].numpy()
            plan[projection.name] = _rows(projection.shape, base.sparsity[projection.name], lam, values)
    return SparsityPlan(plan, keeps_first=True)


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
