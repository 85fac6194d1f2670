"""Space of [`Search`]: sparsities by projection that hit the target, and directions that keep it."""

from dataclasses import dataclass

import torch

from ..model.projections import Decoder, Projection
from ..saliency.plan import SparsityPlan
from .allocation import LARGEST, SMALLEST, shift_to_mean


NEGLIGIBLE = 1e-9


@dataclass(frozen=True)
class Space:
    """Sparsities and directions with one float64 entry per projection."""

    names: list[str]
    sizes: torch.Tensor  # numbers of weights
    blocks: torch.Tensor  # int64: number of the block, among the blocks with pruned projections
    depth: torch.Tensor  # position of the block, from -1 (first) to 1 (last); 0 if there is only one
    kinds: dict[str, torch.Tensor]  # kind -> 1 for the projections of this kind, else 0
    target: float  # mean sparsity of all weights

    @classmethod
    def of(cls, decoder: Decoder, target: float) -> "Space":
        pruned = [block.pruned for block in decoder.blocks if block.pruned]
        found = [(index, projection) for index, projections in enumerate(pruned) for projection in projections]
        blocks = torch.tensor([index for index, _ in found])
        depth = 2 * blocks.double() / max(1, len(pruned) - 1) - float(len(pruned) > 1)
        own = [kind_moved(projection) for _, projection in found]
        kinds = {kind: torch.tensor([other == kind for other in own]).double() for kind in dict.fromkeys(own)}
        sizes = torch.tensor([projection.numel for _, projection in found], dtype=torch.float64)
        return cls([projection.name for _, projection in found], sizes, blocks, depth, kinds, target)

    @property
    def uniform(self) -> torch.Tensor:
        return torch.full_like(self.sizes, self.target)

    def directions(self, number: int) -> dict[str, torch.Tensor]:
        """Return the directions that round `number` (from 0) probes, name -> direction of weighted mean 0.

        A direction of the late half of the blocks leaves the early half unchanged, so that candidates along it share
        the work up to there. Directions that move nothing are left out.
        """
        everywhere = torch.ones_like(self.depth)
        found = {kind: self._centered(mask, everywhere) for kind, mask in self.kinds.items()}
        if number % 2 and self.depth.any():
            late = (self.depth > 0).double()
            shapes = {
                "depth": self.depth,
                "curvature over depth": self.depth**2,
                "first block": (self.depth == -1).double(),
                "last block": (self.depth == 1).double(),
            }
            found = {f"{kind}, late": self._centered(mask * late, late) for kind, mask in self.kinds.items()}
            found |= {name: self._centered(shape, everywhere) for name, shape in shapes.items()}
        return {name: direction for name, direction in found.items() if direction.abs().max() > NEGLIGIBLE}

    def _centered(self, direction: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        """Subtract the weighted mean in the part of the model where `where` is 1 and not 0."""
        weights = self.sizes * where
        return direction - where * (direction * weights).sum() / weights.sum()

    def cost(self, candidates: torch.Tensor) -> float:
        """Return the passes of candidates, shape (candidates, projections); they share blocks up to a difference."""
        count = int(self.blocks.max()) + 1
        distinct = [{row.numpy().tobytes() for row in candidates[:, self.blocks <= index]} for index in range(count)]
        return sum(map(len, distinct)) / count

    def on_target(self, sparsities: torch.Tensor) -> torch.Tensor:
        """Shift all sparsities alike, clipped to [0.01, 0.99], so that their weighted mean is the target.

        Sparsities that meet this already stay the same to the bit, so that candidates share equal blocks.
        """
        mean = (sparsities * self.sizes).sum() / self.sizes.sum()
        within = sparsities.min() >= SMALLEST and sparsities.max() <= LARGEST
        if within and abs(mean - self.target) < NEGLIGIBLE:
            return sparsities
        return shift_to_mean(sparsities, self.target, self.sizes)

    def plan(self, sparsities: torch.Tensor) -> SparsityPlan:
        return SparsityPlan(dict(zip(self.names, sparsities.tolist())))


def kind_moved(projection: Projection) -> str:
    """Return the kind of projections that move together: its role, with queries and keys as one kind."""
    role = projection.role or projection.name.rpartition(".")[2]
    role = "query and key" if role in ("query", "key") else role
    return role if projection.expert is None else f"experts' {role}"
