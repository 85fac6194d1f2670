"""How far a sparse model's next-token distributions are from the dense model's, or from the text."""

from collections.abc import Callable

import torch
from torch.nn.functional import cross_entropy, kl_div, log_softmax


def kl(dense: torch.Tensor, sparse: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """`KL(dense || sparse)` of the next-token distributions in nats, summed over all positions but the last."""
    target = log_softmax(dense[:, :-1], dim=-1).flatten(0, 1)
    return kl_div(log_softmax(sparse[:, :-1], dim=-1).flatten(0, 1), target, reduction="sum", log_target=True)


def nll(dense: torch.Tensor, sparse: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Negative log-likelihood of the text in nats under the sparse model, summed over its predicted tokens."""
    return cross_entropy(sparse[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")


# Logits of both models, float32, shape (sequences, tokens, vocabulary), and the token ids -> a scalar.
OUTPUT_METRICS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {"kl": kl, "nll": nll}
