"""How a rotation changes a weight or bias: pure functions of tensors. Rotations that are None change nothing."""

import torch

from ..blocks.statistics import wide_dtype
from ..model.projections import Projection
from .rotated_weights import Heads, RotatedBlock


ROWS = 4096  # of a vocabulary's matrix that are computed at a time


def turn_weight(
    projection: Projection,
    own: RotatedBlock,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    stream: torch.Tensor | None,
    heads: torch.Tensor | None,
) -> torch.Tensor:
    """Return a projection's rotated weight. The original, shape (out, in), in the widest type, may change in place.

    `scale`, shape (in,), is of the norm in front; `stream` is R1, `heads` is R2 of shape (key-value heads, size,
    size).
    """
    layout = own.heads
    if scale is not None:
        weight = weight * like(scale, weight)
        if stream is not None:
            weight = weight @ like(stream, weight)
    if heads is not None and projection is layout.writer:
        weight[layout.rows] = turn_rows(weight[layout.rows], heads)
    if heads is not None and projection is layout.reader:
        weight = turn_columns(weight, heads, layout)
    if stream is not None and projection in own.writers:
        weight = like(stream, weight).T @ weight
    return weight


def turn_bias(
    projection: Projection,
    own: RotatedBlock,
    bias: torch.Tensor,
    stream: torch.Tensor | None,
    heads: torch.Tensor | None,
) -> torch.Tensor:
    """Return a projection's rotated bias, shape (out,)."""
    layout = own.heads
    if heads is not None and projection is layout.writer:
        bias[layout.rows] = turn_rows(bias[layout.rows, None], heads)[:, 0]
    if stream is not None and projection in own.writers:
        bias = like(stream, bias).T @ bias
    return bias


def turn_table(
    into: torch.Tensor, original: torch.Tensor, scale: torch.Tensor | None, stream: torch.Tensor | None
) -> None:
    """Write the rotated embeddings or head, shape (vocabulary, hidden), in pieces: in float64 they take gigabytes."""
    for own, piece in zip(into.split(ROWS), original.split(ROWS)):
        wide = widened(piece, into.device)
        wide = wide if scale is None else wide * like(scale, wide)
        own.copy_(wide if stream is None else wide @ like(stream, wide))


def turn_columns(weight: torch.Tensor, heads: torch.Tensor, layout: Heads) -> torch.Tensor:
    """Return the weight, shape (out, in), that reads rotated values."""
    turned = like(heads, weight).repeat_interleave(layout.group, dim=0)
    split = weight.unflatten(1, (-1, layout.size)).transpose(0, 1)
    return (split @ turned).transpose(0, 1).flatten(1)


def turn_rows(values: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
    """Return rotated rows of values, shape (heads * size, in)."""
    count, size = heads.shape[:2]
    return (like(heads, values).transpose(1, 2) @ values.unflatten(0, (count, size))).flatten(0, 1)


def unless_identity(rotation: torch.Tensor | None) -> torch.Tensor | None:
    """Return a rotation of shape (..., n, n), or None if it is the identity, which must not change a bit."""
    if rotation is None:
        return None
    identity = torch.eye(rotation.shape[-1], dtype=rotation.dtype, device=rotation.device)
    return None if torch.equal(rotation, identity.expand_as(rotation)) else rotation


def widened(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy of a tensor in the widest type of a device."""
    return tensor.detach().to(device, wide_dtype(device), copy=True)


def like(rotation: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return rotation.to(weight.device, weight.dtype)
