"""What top-ups share that give every block one sparsity, the same in all its projections."""

from collections.abc import Callable, Sequence

import torch

from ..model.projections import Block, Decoder, Projection
from ..saliency.wanda import Wanda
from ..sparsity.plan import SparsityPlan
from ..trials.sweep import Sweep


def pruned_blocks(decoder: Decoder) -> list[Block]:
    """The blocks that have anything to prune, in their order: the user may leave all projections of a block out."""
    return [block for block in decoder.blocks if block.pruned]


def block_sizes(blocks: Sequence[Block]) -> torch.Tensor:
    """How many weights of every block are up for pruning: float64, shape (blocks,)."""
    sizes = [block.numel for block in blocks]
    return torch.tensor(sizes, dtype=torch.float64)


def plan_of_blocks(blocks: Sequence[Block], sparsities: torch.Tensor) -> SparsityPlan:
    """The plan that gives every projection the sparsity of its block, shape (blocks,)."""
    return SparsityPlan(
        {name: value for block, value in zip(blocks, sparsities.tolist()) for name in block.pruned_names}
    )


def block_scores(sweep: Sweep, score: Callable[[Block, dict[str, torch.Tensor]], float], label: str) -> torch.Tensor:
    """One number for every block that has anything to prune, told by the dense model: float64, shape (blocks,).

    Args:
        sweep ([`Sweep`]): makes one pass over all calibration sequences, see [`Sweep.dense_scores`].
        score: a block, with its weights at hand, and the activations of its pruned projections -> the number.
        label (`str`): what the progress bar calls the pass.
    """

    def visit(block: Block, activations: dict[str, torch.Tensor]) -> list[float]:
        return [score(block, activations)] if block.pruned else []

    return torch.tensor([value for found in sweep.dense_scores(visit, label) for value in found], dtype=torch.float64)


def wanda_metric(projection: Projection, activations: dict[str, torch.Tensor]) -> torch.Tensor:
    """`|W_ij| a_j` of a projection, whatever the prune's own saliency is: float32, shape (out, in), non-negative."""
    return Wanda().score(projection.weight.float(), activations[projection.name])
