"""How far the inputs of a sparse model's projections are from those of the dense model (paper, Eq. 2 and 3)."""

from collections import Counter
from collections.abc import Callable, Sequence

import torch

from ..engine.statistics import Norms, SquaredNorms, wide_dtype
from ..model.projections import Projection


SMALLEST_SHARE = 1e-9  # of one input feature; on average it has one in several thousands


def l2(dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
    """`|| d - s ||_2` of normalised activations, shape (sequences, in) -> (sequences,)."""
    return torch.linalg.vector_norm(dense - sparse, dim=-1)


def cosine(dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
    """`1 - cos(d, s)` of normalised activations, shape (sequences, in) -> (sequences,).

    Computed as `|| d / |d| - s / |s| ||^2 / 2`, which does not lose the digits of small angles and is never negative.
    """
    return (_unit(dense) - _unit(sparse)).square().sum(dim=-1) / 2


def kl(dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
    """`KL(d || s) = sum of d log(d / s) - d + s` in nats, shape (sequences, in) -> (sequences,).

    Normalised activations are distributions, whose `- d + s` cancels out. It keeps every term from being negative
    where shares below `SMALLEST_SHARE` count as that much: the share of a feature that pruning has silenced is zero,
    and the divergence would be infinite.
    """
    dense, sparse = dense.clamp(min=SMALLEST_SHARE), sparse.clamp(min=SMALLEST_SHARE)
    return (dense * (dense / sparse).log() - dense + sparse).sum(dim=-1)


METRICS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {"l2": l2, "cosine": cosine, "kl": kl}
SCOPES = ("sequence", "pooled")


def alignment_error(
    dense: torch.Tensor, sparse: torch.Tensor, scope: str = "sequence", metric: str = "l2"
) -> torch.Tensor:
    """Alignment error of one projection: `metric(a_D / sum(a_D), a_S / sum(a_S)) / in`. Lower is better.

    Args:
        dense, sparse (`Tensor` of shape (sequences, in)): squared norms of the projection's input in both models.
        scope (`str`):
            `"sequence"`: one activation per sequence, the errors summed over the sequences (paper, Eq. 3).
            `"pooled"`: one activation over all sequences (the authors' code).
        metric (`str`): a name in `METRICS`: `"l2"` (the paper's), or `"cosine"` or `"kl"` (its ablation).

    Returns:
        `Tensor`: a scalar in the widest type of the tensors' device.
    """
    if scope == "pooled":
        dense, sparse = dense.mean(dim=0, keepdim=True), sparse.mean(dim=0, keepdim=True)
    errors = METRICS[metric](_normalise(dense), _normalise(sparse))
    return errors.sum() / dense.shape[-1]


def total_error(
    projections: Sequence[Projection], dense: Norms, sparse: Norms, scope: str, metric: str
) -> torch.Tensor:
    """Sum of the alignment errors of projections; those that share an input share the computation.

    The experts of a layer count as one projection: each with its share of the tokens that the dense model routes,
    so that many experts with few tokens do not drown the rest of the model.
    """
    shares = _expert_shares(projections, dense)
    errors: dict[SquaredNorms, torch.Tensor] = {}  # projections that share an input share its norms
    total = torch.zeros(())
    for projection in projections:
        name = projection.name
        if sparse[name] not in errors:
            errors[sparse[name]] = alignment_error(dense[name].value, sparse[name].value, scope, metric)
        total = total + shares.get(name, 1.0) * errors[sparse[name]]
    return total


def _expert_shares(projections: Sequence[Projection], dense: Norms) -> dict[str, float]:
    experts = [projection for projection in projections if projection.expert is not None]
    tokens = Counter()
    for projection in experts:
        tokens[projection.group] += dense[projection.name].tokens
    return {p.name: dense[p.name].tokens / max(1, tokens[p.group]) for p in experts}


def _unit(vectors: torch.Tensor) -> torch.Tensor:
    return vectors / torch.linalg.vector_norm(vectors, dim=-1, keepdim=True).clamp(min=1e-30)


def _normalise(squared_norms: torch.Tensor) -> torch.Tensor:
    activations = squared_norms.to(wide_dtype(squared_norms.device)).sqrt()
    # An input that is zero everywhere (dead ReLUs) stays zero rather than becoming 0 / 0.
    return activations / activations.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(activations.dtype).tiny)
