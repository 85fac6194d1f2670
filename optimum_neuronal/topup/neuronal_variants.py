"""NeuronAL as in the authors' code, which gave the paper's figures, and to the letter of the paper's Algorithm 1."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from ..blocks.statistics import SquaredNorms
from ..model.projections import Decoder
from ..saliency.plan import Plan
from ..trials import PlanEvaluator
from ..trials.alignment import Deviation
from .base import register_topup
from .distribution import (
    LEAST_SPARSITY,
    MOST_SPARSITY,
    authors_dist,
    authors_rounding,
    plan_of_blocks,
    pruned_blocks,
    rise,
)
from .neuronal import LAMBDAS, NeuronAL


@register_topup("neuronal", variant="authors")
@dataclass(frozen=True)
class AuthorsNeuronAL(NeuronAL):
    """Takes both steps, with errors of activations pooled over the sequences.

    Candidates are the saliency's own, solved if it updates weights. The block step rounds sparsities down to whole weights
    of a row, the row step rounds them up. Rows of `down` and of the last block have equal sparsity.
    """

    summary = "NeuronAL decided where the sparsity goes, as in the code behind its paper's tables."
    variant_fields = {**NeuronAL.variant_fields, "steps": "both", "alignment_scope": "pooled"}

    def candidate_evaluator(self, evaluator: PlanEvaluator) -> PlanEvaluator:
        if self.alignment_scope != "pooled":
            return evaluator
        saliency = evaluator.saliency
        return replace(evaluator, norms=saliency.statistic if saliency.updates_weights else RunningNorms)

    def lambdas_of_blocks(self, sparsity: float) -> Sequence[float]:
        return LAMBDAS[:-1] if sparsity >= 0.8 and self.block_lambdas == LAMBDAS else self.block_lambdas

    def block_plan(self, decoder: Decoder, sparsity: float, lam: float) -> Plan:
        count = len(pruned_blocks(decoder))
        risen = 1 - rise(count, self.schedule).numpy()[::-1]
        values = np.arange(1, count + 1) if self.schedule == "linear" else risen
        # Rising, as their code sorts densities.
        return plan_of_blocks(decoder, authors_dist(values, sparsity, lam)[::-1])

    def as_pruned(self, evaluator: PlanEvaluator, plan: Plan) -> Plan:
        return authors_rounding(evaluator, plan)

    def row_plans(self, decoder: Decoder, base: Plan, plan: Plan, deviation: Deviation) -> tuple[list[Plan], None]:
        return [row_plan(decoder, base, lam, deviation) for lam in self.row_lambdas], None


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


def row_plan(decoder: Decoder, base: Plan, lam: float, deviation: Deviation) -> Plan:
    """Spread the base plan's sparsity over rows: in all blocks but the last, where rows feed a place in their block.

    Rows of q, k and v of Mistral models have equal sparsity.
    """
    plan, is_mistral = {}, decoder.config.model_type == "mistral"
    for block in decoder.blocks:
        for projection in block.pruned:
            place = decoder.place_fed_by(block, projection)
            alike = place is None or place.name == block.name or block is decoder.blocks[-1]
            alike = alike or (is_mistral and any(name in projection.name for name in ("q_proj", "k_proj", "v_proj")))
            values = np.zeros(1) if alike else deviation.places[place.name].numpy()
            plan[projection.name] = rows_of(projection.shape, base.sparsity[projection.name], lam, values)
    return Plan(plan, keeps_first=True)


def rows_of(shape: tuple[int, int], sparsity: float, lam: float, values: np.ndarray) -> torch.Tensor:
    """Return the sparsity of every row, rounded up: `int(in * (1 - s))` weights stay.

    Rows of q, k and v, and of fused projections, take the values in order: the first ones, or all of them repeatedly.
    """
    densities = np.array([1 - sparsity])
    if np.ptp(values) > 0:
        density = (values - values.min()) / (values.max() - values.min()) * lam * 2
        density -= np.mean(density) - (1 - sparsity)
        densities = 1 - np.clip(1 - density, LEAST_SPARSITY, MOST_SPARSITY)
    kept = (np.resize(densities, shape[0]) * shape[1]).astype(np.int64)
    return torch.from_numpy((shape[1] - kept) / shape[1])


# As the paper's appendix lists them; its tables have 0.04.
PRINTED_LAMBDAS = tuple(lam for lam in LAMBDAS if lam != 0.04)


@register_topup("neuronal", variant="printed")
@dataclass(frozen=True)
class PrintedNeuronAL(NeuronAL):
    """Takes dense activations from the dense model's own stream and both steps, see [`printed_deviation`].

    The final masks come from the dense model's scores too. Candidates are the saliency's own, solved if it updates
    weights.
    """

    summary = "NeuronAL decided where the sparsity goes, by its paper's Algorithm 1."
    variant_fields = {
        "steps": "both",
        "reference": "dense",
        "alignment_scope": "sequence",
        "block_lambdas": PRINTED_LAMBDAS,
        "row_lambdas": (0.0, *PRINTED_LAMBDAS),
        "final_scores": "dense",
    }
    deviation_kind = "printed"

    def candidate_evaluator(self, evaluator: PlanEvaluator) -> PlanEvaluator:
        return evaluator
