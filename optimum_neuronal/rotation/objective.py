"""The objective of a rotation: the importance that a threshold at the target sparsity would cut.

`L = sum_m phi_m * sum_ij S_ij [S_ij <= q(S_m)] / ||W_m X||^2` over all projections m, with the importance
`S_ij = W'_ij^2 / [R^T H^-1 R]_jj` of optimal brain damage (LeCun et al., 1989; Hassibi and Stork, 1993) in the rotated
weights W', the rotation R of the projection's input, the dampened `H = X X^T`, the quantile q of the matrix, and the Fisher
weights phi.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ..engine.statistics import Hessian
from ..model.projections import Projection
from .parts import BlockParts, Heads
from .turns import turn_columns


DAMPENING = 0.01  # of a Hessian: share of its mean diagonal
LOOK_EVERY = 5  # steps between two looks at the quantiles


@dataclass(eq=False)
class Term:
    """One projection in the objective.

    Args:
        projection ([`Projection`]): of its block.
        parts ([`BlockParts`]): of its block.
        matrix (`Tensor`):
            Its weight, folded and not rotated, with rows of values last; or the sampled part of it: see [`sampled`].
        inverse (`Tensor`):
            Of its input's Hessian, float32: shape (in, in) if it reads the stream, the diagonal blocks of shape (query
            heads, size, size) if it reads heads, else the diagonal of shape (in,).
        weight (`float`): Fisher weight by the energy of its output, and by the share that is sampled.
        chosen (`Tensor` of int64, *optional*): the heads' values that are looked at, when they are rotated. None: all.
        cut (`float` or `Tensor`): the quantile of its importance, as last seen.
    """

    projection: Projection
    parts: BlockParts
    matrix: torch.Tensor
    inverse: torch.Tensor
    weight: float
    chosen: torch.Tensor | None = None
    cut: torch.Tensor | None = field(default=None)

    def importance(
        self, stream: torch.Tensor | None, heads: torch.Tensor, diagonal: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the importance of all weights, or of the sampled ones, shape (out, in), float32.

        Args:
            stream (`Tensor`, *optional*), heads (`Tensor`): rotations of the stream, and of this block's heads.
            diagonal (`Tensor`, *optional*): of `R^T inverse R`, shape (in,), if it reads the stream.
        """
        layout, weight = self.parts.heads, self.matrix.float()
        if self.projection is layout.writer:
            values = weight[-layout.count * layout.size :].unflatten(0, (layout.count, layout.size))
            turned = (heads.transpose(1, 2) @ values).flatten(0, 1)
            others = weight[: -layout.count * layout.size]
            weight = torch.cat([others, turned if self.chosen is None else turned[self.chosen]])
        if diagonal is not None:
            weight = weight if stream is None else weight @ stream
        elif self.projection is layout.reader:
            turned = heads.repeat_interleave(layout.group, dim=0)
            diagonal = ((self.inverse @ turned) * turned).sum(1).flatten()
            weight = turn_columns(weight, heads, layout)
            if self.chosen is not None:
                weight, diagonal = weight[:, self.chosen], diagonal[self.chosen]
        else:
            diagonal = self.inverse
        if stream is not None and self.projection in self.parts.writers:
            weight = stream.T @ weight
        return weight.square() / diagonal

    def lost(self, importance: torch.Tensor, share: float, look: bool) -> torch.Tensor:
        """Return the importance of what a cut of this share loses, a scalar. The quantile itself gets no gradient."""
        flat = importance.flatten()
        if look or self.cut is None:
            self.cut = flat.detach().kthvalue(max(1, int(share * flat.numel()))).values
        below = (flat.detach() <= self.cut).to(flat.dtype)
        return self.weight * torch.dot(flat, below)  # quicker than torch.where, both ways


@dataclass(frozen=True)
class Sample:
    """A choice of rows at random.

    Args:
        rows (`int`, *optional*): of a projection at most; experts of a mixture share them. None: all.
        generator (`Generator`): chooses them.
    """

    rows: int | None
    generator: torch.Generator

    def choose(self, of: int, experts: int = 1) -> torch.Tensor | None:
        """Return the chosen ones of so many rows, ascending; None for all."""
        if self.rows is None or max(1, self.rows // experts) >= of:
            return None
        return torch.randperm(of, generator=self.generator)[: max(1, self.rows // experts)].sort().values


def find_terms(
    parts: BlockParts, norms: Mapping[str, Hessian], fisher: Mapping[str, float], sample: Sample
) -> list[Term]:
    """Return the terms of a block: its pruned projections that a rotation changes, and that have seen inputs.

    Args:
        parts ([`BlockParts`]): of the block, whose norms are folded, with its weights at hand.
        norms (`Mapping[str, Hessian]`): projection name -> statistic of its input.
        fisher (`Mapping[str, float]`): projection name -> Fisher weight.
        sample ([`Sample`]): of the rows.
    """
    readers, inverses, terms = _readers(parts), {}, []
    turned = {*readers, *parts.writers, parts.heads.writer, parts.heads.reader}
    seen = [p for p in parts.block.pruned if p in turned and p.name in norms and norms[p.name].tokens]
    for projection in seen:
        energy = _energy(projection, norms[projection.name])
        if energy == 0:
            continue
        norm, group = norms[projection.name], projection.group if projection in readers else None
        key = group or id(norm)
        if key not in inverses:
            together = {id(n): n for n in (norms[p.name] for p in seen if p.group == group)} if group else {0: norm}
            inverse = _inverse(sum(n.hessian for n in together.values()) / sum(n.tokens for n in together.values()))
            inverses[key] = inverse if projection in readers else _part(inverse, parts.heads, projection)
        terms.append(sampled(projection, parts, inverses[key], fisher[projection.name] / energy, sample))
    return terms


def sampled(projection: Projection, parts: BlockParts, inverse: torch.Tensor, weight: float, sample: Sample) -> Term:
    """Return a term of a sample of a projection's rows, which must be the rotated ones.

    What only writes into the stream, whose rows mix, gets a sample of its columns. The values of a head mix too, so all of
    their rows or columns stay in memory, and the sample is taken of the rotated ones.
    """
    layout, matrix, chosen = parts.heads, projection.weight, None
    values = layout.count * layout.size
    experts = 1 if projection.group is None else sum(p.group == projection.group for p in parts.block.pruned)
    looked_at = projection.numel
    if projection is layout.reader:
        chosen = sample.choose(matrix.shape[1])
        looked_at = len(matrix) * (matrix.shape[1] if chosen is None else len(chosen))
    elif projection in parts.writers:
        columns = sample.choose(matrix.shape[1], experts)
        if columns is not None:
            matrix, inverse = matrix[:, columns.to(matrix.device)], inverse[columns.to(inverse.device)]
        looked_at = matrix.numel()
    else:
        matrix = layout.values_last(matrix) if projection is layout.writer else matrix
        own = len(matrix) - values if projection is layout.writer else len(matrix)
        rows = sample.choose(own, experts)
        if rows is not None:
            matrix = torch.cat([matrix[rows.to(matrix.device)], matrix[own:]])
        looked_at = matrix.numel()
        if projection is layout.writer:
            chosen = sample.choose(values)
            looked_at -= 0 if chosen is None else (values - len(chosen)) * matrix.shape[1]
    chosen = None if chosen is None else chosen.to(matrix.device)
    return Term(projection, parts, matrix, inverse, weight * projection.numel / looked_at, chosen)


def _energy(projection: Projection, norm: Hessian) -> float:
    """Return the mean square norm of a projection's output, for inputs of this statistic."""
    weight = projection.weight.float()
    energy = float(((weight @ norm.hessian) * weight).sum()) / norm.tokens
    if not math.isfinite(energy):
        raise ValueError(
            f"rotate: the inputs or outputs of {projection.name} are too large for float32: leave rotate out."
        )
    return max(energy, 0.0)


def _part(inverse: torch.Tensor, heads: Heads, projection: Projection) -> torch.Tensor:
    """Return what is needed of the inverse Hessian of an input that is not the stream: see [`Term`]."""
    if projection is not heads.reader:
        return inverse.diagonal().clone()
    square = inverse.unflatten(0, (-1, heads.size)).unflatten(2, (-1, heads.size))
    return square.diagonal(dim1=0, dim2=2).permute(2, 0, 1).contiguous()


def block_loss(
    terms: Sequence[Term], stream: torch.Tensor | None, heads: torch.Tensor, share: float, look: bool
) -> torch.Tensor:
    """Return the objective of a block, a scalar in float32.

    Args:
        terms (`Sequence[Term]`): of the block, at least one.
        stream (`Tensor`, *optional*), heads (`Tensor`): rotations of the stream and of the block's heads.
        share (`float`): that the threshold cuts, above 0, at most 1.
        look (`bool`): True to find the thresholds anew.
    """
    diagonals: dict[int, torch.Tensor] = {}
    device = terms[0].inverse.device  # blocks may lie on several
    stream, heads = None if stream is None else stream.to(device), heads.to(device)
    losses = []
    for term in terms:
        diagonal = None
        if term.projection in _readers(term.parts):
            key = id(term.inverse)
            if key not in diagonals:
                diagonals[key] = ((term.inverse @ stream) * stream).sum(0)
            diagonal = diagonals[key]
        losses.append(term.lost(term.importance(stream, heads, diagonal), share, look))
    return torch.stack(losses).sum()


def _readers(parts: BlockParts) -> set[Projection]:
    return {projection for _, readers in parts.folds for projection in readers}


def _inverse(hessian: torch.Tensor) -> torch.Tensor:
    """Return the inverse of a dampened Hessian, float32."""
    wide = hessian.double() if hessian.device.type != "mps" else hessian
    wide = wide + DAMPENING * wide.diagonal().mean() * torch.eye(len(wide), dtype=wide.dtype, device=wide.device)
    return torch.linalg.inv(wide).float()
