"""How far a sparse model's next-token distributions are from the dense model's, or from the text."""

from collections.abc import Callable

import torch
from torch.nn.functional import cross_entropy


# Logits of a sparse model, float32, shape (positions, vocabulary), and the tokens that follow, shape (positions,) -> a
# scalar, float32.
Compare = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def kl(dense: torch.Tensor) -> Compare:
    """`KL(dense || sparse)` of the next-token distributions in nats, summed over positions.

    What depends on the dense model alone is computed once for all candidates. Both models' logits are shifted by what makes
    the dense model's log-probabilities, so that nothing large cancels out.

    Args:
        dense (`Tensor`, shape (positions, vocabulary)): the dense model's logits, float32.
    """
    total = dense.logsumexp(dim=-1, keepdim=True)
    expected = dense - total
    probabilities = expected.exp()

    def compare(sparse: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        sparse = sparse - total
        return (torch.linalg.vecdot(probabilities, expected - sparse) + sparse.logsumexp(dim=-1)).sum()

    return compare


def nll(dense: torch.Tensor | None) -> Compare:
    """Negative log-likelihood of the text in nats, summed over the predicted tokens. The dense model plays no part."""
    return lambda sparse, following: cross_entropy(sparse, following, reduction="sum")


# Name -> what is made of the dense model's logits.
OUTPUT_METRICS: dict[str, Callable[[torch.Tensor], Compare]] = {"kl": kl, "nll": nll}
