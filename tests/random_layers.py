"""Weights, and Hessians of correlated inputs, drawn at random from a seed."""

import torch


def weights(rows: int, features: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(rows, features, generator=torch.Generator().manual_seed(seed))


def inputs(features: int, tokens: int = 400, seed: int = 0) -> torch.Tensor:
    """Correlated inputs, (tokens, features)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, features, generator=generator) @ torch.randn(features, features, generator=generator)


def hessian_of(features: int, tokens: int = 400, seed: int = 0) -> torch.Tensor:
    x = inputs(features, tokens, seed)
    return x.T @ x


def dampened(hessian: torch.Tensor) -> torch.Tensor:
    """The Hessian in float64 with the default dampening."""
    hessian = hessian.double()
    return hessian + 0.01 * hessian.diagonal().mean() * torch.eye(len(hessian), dtype=torch.float64)


def solve(saliency, weight, hessian, sparsity, pattern=None) -> torch.Tensor:
    """The sparse, updated weight of one projection."""
    return saliency.solve({"w": weight}, hessian, {"w": sparsity}, pattern)["w"]
