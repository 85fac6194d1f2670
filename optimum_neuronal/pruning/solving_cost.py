"""What reconstructing weights costs beside the runs of blocks: operations, and memory."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..config import NeuronALConfig
from ..decoder.projections import Block, Decoder
from ..engine.levels import level_sparsities, levels_bytes
from ..methods import Methods
from ..saliency.rounding import rounding_operations
from .bit_budget import Pair
from .choosing_bits import searches


FLOAT32 = 4
SQUARES, OTHERS = 6, 12  # matrices of shape (in, in), and of shape (out, in), that exist while a weight is solved
REFIT = 4  # float32 copies of a block's weights: masters, gradients, and Adam's two averages


@dataclass(frozen=True)
class SolvingCost:
    """All zero for a saliency that leaves the weights that stay as they are.

    Args:
        sparsities (`int`): how often each projection is solved: for levels, for candidates, and at the end.
        operations (`int`): floating-point operations, about.
        solver_bytes (`int`): the largest projection's Hessians, and what a solver holds; or the refit's, if larger.
        levels_bytes (`int`): the levels that candidates are made of.
        waiting_bytes (`int`): the kept weights of all blocks, which wait beside the model until the end.
    """

    sparsities: int = 0
    operations: int = 0
    solver_bytes: int = 0
    levels_bytes: int = 0
    waiting_bytes: int = 0


def solving_cost(
    decoder: Decoder, config: NeuronALConfig, methods: Methods, tokens: int, pairs: Sequence[Pair] = ()
) -> SolvingCost:
    """What a config's saliency and top-up solve, if no candidate is abandoned.

    Args:
        decoder ([`Decoder`]): may be on the meta device.
        config ([`NeuronALConfig`]), methods ([`Methods`]): of each other.
        tokens (`int`): of a calibration sequence.
        pairs (`Sequence[Pair]`): of sparsity and bits of values, of which one is chosen first.
    """
    tried = [pair.sparsity for pair in pairs] if len(pairs) > 1 else []
    if not methods.saliency.updates_weights:
        return SolvingCost()
    rounds = config.value_bits is not None
    levels = level_sparsities(config.sparsity, rounds) if methods.topup.uses_levels(methods.saliency) else ()
    shapes = [p.shape for p in decoder.projections.values()]
    gathered = sum(2 * config.num_samples * tokens * columns**2 for _, columns in shapes)
    solved = sum(methods.saliency.operations(shape) for shape in shapes)
    rounded = sum(map(rounding_operations, shapes)) if rounds else 0
    refitted = REFIT * max(block.numel for block in decoder.blocks) * FLOAT32 if config.refit_epochs else 0
    kept = 1 - config.sparsity
    asked = methods.topup.passes_with(methods.saliency)
    candidates = sum(step.plans * step.times for step in asked if not step.by_score)
    often = searches(pairs, methods)
    times = 1 + often * (len(levels) + candidates) + len(tried)
    trial_tokens = candidates * config.num_alignment_samples / config.num_samples  # as a share of all tokens
    return SolvingCost(
        sparsities=times,
        operations=times * solved
        + rounded
        + int((1 + often * (bool(levels) + trial_tokens) + bool(tried)) * gathered),
        solver_bytes=max(refitted, *(FLOAT32 * (SQUARES * n * n + OTHERS * m * n) for m, n in shapes)),
        levels_bytes=max(sum(levels_bytes(block, at) for block in decoder.blocks) for at in (levels, tried)),
        waiting_bytes=int(sum(kept * block.numel * _itemsize(block) for block in decoder.blocks)),
    )


def _itemsize(block: Block) -> int:
    return block.pruned[0].owner.dtype.itemsize if block.pruned else 0
