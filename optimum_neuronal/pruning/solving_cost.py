"""What reconstructing and rounding weights costs beside the runs of blocks: operations, and memory."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..config import NeuronALConfig
from ..engine.paired_inputs import STAGES
from ..methods import Methods
from ..model.projections import Block, Decoder
from ..saliency.rounding import PASSES, fitted_weights, pass_operations
from ..trials.applier import QUICK
from ..trials.levels import level_sparsities, levels_bytes
from .bit_budget import Pair, searches


FLOAT32 = 4
SQUARES, OTHERS = 6, 12  # matrices of shape (in, in), and of shape (out, in), that exist while a weight is solved
REFIT = 4  # float32 copies of a block's weights: masters, gradients, and Adam's two averages
ROUNDED = 2  # float32 copies of a block's weights that wait to be rounded: what they stand for, and sparse


@dataclass(frozen=True)
class SolvingCost:
    """All zero where the weights that stay remain as they are.

    Args:
        sparsities (`int`): how often each projection is solved: for levels, for candidates, and at the end.
        operations (`int`): floating-point operations, about.
        solver_bytes (`int`): the largest projection's Hessians, and what a solver holds; or the refit's, if larger.
        levels_bytes (`int`): the levels that candidates are made of.
        waiting_bytes (`int`): the kept weights of all blocks, which wait beside the model until the end.
        fitted (`int`): weights whose scales are fitted, where values become few bits.
        swept (`int`): weights whose values move to their best levels, once for every time.
        made (`int`): values that a solver computes one by one, beside matrix products.
    """

    sparsities: int = 0
    operations: int = 0
    solver_bytes: int = 0
    levels_bytes: int = 0
    waiting_bytes: int = 0
    fitted: int = 0
    swept: int = 0
    made: int = 0


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
    shapes, saliency, bits = [p.shape for p in decoder.projections.values()], methods.saliency, config.value_bits
    kept = 1 - config.sparsity
    waiting = int(sum(kept * block.numel * _itemsize(block) for block in decoder.blocks))
    weights = sum(rows * columns for rows, columns in shapes)
    fitted = sum(fitted_weights(shape, bits) for shape in shapes) if bits is not None else 0
    again = weights if bits is not None else 0  # in the end, to find the codes of what was rounded
    if not saliency.updates_weights:
        return SolvingCost() if bits is None else SolvingCost(fitted=fitted + again, waiting_bytes=waiting)
    tried = [pair.sparsity for pair in pairs] if len(pairs) > 1 else []
    levels = level_sparsities(config.sparsity, bits is not None) if methods.topup.uses_levels(saliency) else ()
    asked, often = methods.topup.passes_with(saliency), searches(pairs, methods)
    candidates = sum(step.plans * step.times for step in asked if not step.by_score)
    quick, whole = often * len(levels) + len(tried), 1 + often * candidates
    sweeps = PASSES * whole + QUICK * quick if bits is not None else 0
    gathered = sum(2 * config.num_samples * tokens * columns**2 for _, columns in shapes)
    looks = STAGES if bits is not None and config.refit_epochs else 0
    trial_tokens = candidates * config.num_alignment_samples / config.num_samples  # as a share of all tokens
    return SolvingCost(
        sparsities=quick + whole,
        operations=(quick + whole) * sum(map(saliency.operations, shapes))
        + sweeps * sum(map(pass_operations, shapes))
        + int((1 + often * (bool(levels) + trial_tokens) + bool(tried) + looks) * gathered),
        solver_bytes=_solver_bytes(decoder, config),
        levels_bytes=max(sum(levels_bytes(block, at) for block in decoder.blocks) for at in (levels, tried)),
        waiting_bytes=waiting,
        fitted=(quick + whole) * fitted + again,
        swept=sweeps * weights,
        made=(quick + whole) * sum(map(saliency.made, shapes)),
    )


def _solver_bytes(decoder: Decoder, config: NeuronALConfig) -> int:
    shapes = [p.shape for p in decoder.projections.values()]
    block = max(block.numel for block in decoder.blocks) * FLOAT32
    solved = max(FLOAT32 * (SQUARES * n * n + OTHERS * m * n) for m, n in shapes)
    rounded = ROUNDED * block if config.value_bits is not None else 0
    return max(REFIT * block if config.refit_epochs else 0, solved + rounded)


def _itemsize(block: Block) -> int:
    return block.pruned[0].owner.dtype.itemsize if block.pruned else 0
