"""The objective of a rotation: the importance that a threshold at the target sparsity cuts.

`L = sum_m phi_m * sum_ij S_ij [S_ij <= q(S_m)] / ||W_m X||^2` over all projections m, with the importance `S_ij =
W'_ij^2 / [R^T H^-1 R]_jj` of the optimal brain surgeon (Hassibi and Stork, 1993), the rotated weights W', the rotation
R of the projection's input, the dampened `H = X X^T`, the quantile q of the matrix, and the Fisher weights phi.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ..blocks.statistics import Hessian, wide_dtype
from ..model.projections import Projection
from .merging import turn_columns
from .rotated_weights import RotatedBlock


DAMPENING = 0.01  # of a Hessian: share of its mean diagonal
BISECTIONS = 60
LEAST_ROWS = 8  # a projection's share of rows is at least the mean divided by this
LOOK_EVERY = 5  # steps between two draws of rows and quantiles


@dataclass(eq=False)
class Term:
    """One projection in the objective."""

    projection: Projection
    rotated: RotatedBlock
    # Of its input's Hessian, float32: shape (in, in) if it reads the stream, the diagonal blocks of shape (query heads,
    # size, size) if it reads heads, otherwise the diagonal of shape (in,).
    inverse: torch.Tensor
    weight: float  # Fisher weight by the energy of its output
    matrix: torch.Tensor = field(init=False)  # folded, not rotated, rows of values last; or the drawn rows or columns
    columns: torch.Tensor | None = field(default=None, init=False)  # the drawn ones; None: all
    values: torch.Tensor | None = field(default=None, init=False)  # the drawn ones of heads, after rotation; None: all
    rows: float = field(default=1.0, init=False)  # share of the rows that are drawn, see `divide_rows`
    cut: torch.Tensor | None = field(default=None, init=False)  # the last quantile of its importance

    def draw(self, generator: torch.Generator) -> None:
        """Draw rows of the rotated weight, and forget the threshold.

        A rotation mixes rows of weights that write into the stream, so columns are drawn. It mixes the values of a head,
        so `matrix` keeps all of them, and the sample is of the rotated ones.
        """
        layout, weight, self.cut = self.rotated.heads, self.projection.weight, None

        def choose(of: int) -> torch.Tensor | None:
            if self.rows == 1:
                return None
            chosen = torch.randperm(of, generator=generator)[: max(1, round(self.rows * of))]
            return chosen.sort().values.to(weight.device)

        if self.projection is layout.reader:
            self.values, self.matrix = choose(weight.shape[1]), weight
        elif self.projection in self.rotated.writers:
            self.columns = choose(weight.shape[1])
            self.matrix = weight if self.columns is None else weight[:, self.columns]
        elif self.projection is layout.writer:
            weight = layout.values_last(weight)
            others = weight.shape[0] - len(layout.rows)  # queries and keys, where they share a matrix
            rows, self.values = choose(others), choose(len(layout.rows))
            self.matrix = weight if rows is None else torch.cat([weight[rows], weight[others:]])
        else:
            rows = choose(weight.shape[0])
            self.matrix = weight if rows is None else weight[rows]

    def measure(self, share: float) -> float:
        layout, self.rows = self.rotated.heads, 1.0
        self.draw(torch.Generator())
        heads = torch.eye(layout.size, device=self.matrix.device).expand(layout.count, -1, -1)
        diagonal = self.inverse.diagonal() if self.projection in self.rotated.readers else None
        return float(self.lost(self.importance(None, heads, diagonal), share))

    def importance(
        self, stream: torch.Tensor | None, heads: torch.Tensor, diagonal: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the importance of the drawn weights, float32. `diagonal`: of `R^T inverse R`, if it reads the stream."""
        layout, weight = self.rotated.heads, self.matrix.float()
        if self.projection is layout.writer:
            values = weight[-len(layout.rows) :].unflatten(0, (layout.count, layout.size))
            turned = (heads.transpose(1, 2) @ values).flatten(0, 1)
            others = weight[: -len(layout.rows)]
            weight = torch.cat([others, turned if self.values is None else turned[self.values]])
        if diagonal is not None:
            weight = weight if stream is None else weight @ stream
        elif self.projection is layout.reader:
            turned = heads.repeat_interleave(layout.group, dim=0)
            diagonal = ((self.inverse @ turned) * turned).sum(1).flatten()
            weight = turn_columns(weight, heads, layout)
            if self.values is not None:
                weight, diagonal = weight[:, self.values], diagonal[self.values]
        else:
            diagonal = self.inverse if self.columns is None else self.inverse[self.columns]
        if stream is not None and self.projection in self.rotated.writers:
            weight = stream.T @ weight
        return weight.square() / diagonal

    def lost(self, importance: torch.Tensor, share: float) -> torch.Tensor:
        """Return the importance that a cut loses, estimated from drawn rows. The quantile gets no gradient."""
        flat = importance.flatten()
        if self.cut is None:
            self.cut = flat.detach().kthvalue(max(1, int(share * flat.numel()))).values
        below = (flat.detach() <= self.cut).to(flat.dtype)
        return self.weight * self.projection.numel / flat.numel() * torch.dot(flat, below)  # quicker than torch.where


def divide_rows(lost: Mapping[Term, float], share: float) -> None:
    """Set each term's share of drawn rows, of mean `share` in (0, 1] over all weights and at least an eighth of it.

    It is in proportion to the root of the loss per weight, which minimizes the variance of the sum.
    """
    sizes = {term: term.projection.numel for term in lost}
    roots = {term: (value / sizes[term]) ** 0.5 for term, value in lost.items()}
    least, most = 0.0, max(1 / root if root else 1.0 for root in roots.values())
    for _ in range(BISECTIONS):
        factor = (least + most) / 2
        for term in lost:
            term.rows = min(1.0, max(share / LEAST_ROWS, factor * roots[term]))
        drawn = sum(term.rows * size for term, size in sizes.items())
        least, most = (factor, most) if drawn < share * sum(sizes.values()) else (least, factor)


def find_terms(rotated: RotatedBlock, norms: Mapping[str, Hessian], fisher: Mapping[str, float]) -> list[Term]:
    """Return the terms of a block with folded norms: its pruned and rotated projections that received inputs."""
    readers, inverses, terms, changed = rotated.readers, {}, [], set(rotated.projections)
    seen = [p for p in rotated.block.pruned if p in changed and p.name in norms and norms[p.name].tokens]
    for projection in seen:
        energy = _energy(projection, norms[projection.name])
        if energy == 0:
            continue
        norm, group = norms[projection.name], projection.group if projection in readers else None
        key = group or id(norm)
        if key not in inverses:
            together = {id(n): n for n in (norms[p.name] for p in seen if p.group == group)} if group else {0: norm}
            hessian = sum(n.hessian for n in together.values()) / sum(n.tokens for n in together.values())
            wide = hessian.to(wide_dtype(hessian.device))
            inverse = torch.linalg.inv(wide + torch.diag(DAMPENING * wide.diagonal().mean().expand(len(wide)))).float()
            if projection is rotated.heads.reader:  # its diagonal blocks
                square = inverse.unflatten(0, (-1, rotated.heads.size)).unflatten(2, (-1, rotated.heads.size))
                inverse = square.diagonal(dim1=0, dim2=2).permute(2, 0, 1).contiguous()
            elif projection not in readers:
                inverse = inverse.diagonal().clone()
            inverses[key] = inverse
        terms.append(Term(projection, rotated, inverses[key], fisher[projection.name] / energy))
    return terms


def _energy(projection: Projection, norm: Hessian) -> float:
    weight = projection.weight.float()
    energy = float(((weight @ norm.hessian) * weight).sum()) / norm.tokens
    if not math.isfinite(energy):
        raise ValueError(
            f"rotate: inputs or outputs of {projection.name} are too large for float32. Set rotate=False."
        )
    return max(energy, 0.0)


def block_loss(
    terms: Sequence[Term],
    stream: torch.Tensor | None,
    heads: torch.Tensor,
    share: float,
    drawn_by: torch.Generator | None,
) -> torch.Tensor:
    """Return the objective of a block, a float32 scalar, at a cut of `share`. `drawn_by` draws new rows and thresholds."""
    diagonals: dict[int, torch.Tensor] = {}
    device = terms[0].inverse.device  # blocks may lie on several
    stream, heads = None if stream is None else stream.to(device), heads.to(device)
    losses = []
    for term in terms:
        if drawn_by is not None:
            term.draw(drawn_by)
        key, diagonal = id(term.inverse), None
        if term.projection in term.rotated.readers:
            if key not in diagonals:
                diagonals[key] = ((term.inverse @ stream) * stream).sum(0)
            diagonal = diagonals[key]
        losses.append(term.lost(term.importance(stream, heads, diagonal), share))
    return torch.stack(losses).sum()
