"""NeuronAL to the letter of the paper's Algorithm 1."""

from dataclasses import dataclass

from ..trials import PlanEvaluator
from .base import register_topup
from .neuronal import LAMBDAS, NeuronAL


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
