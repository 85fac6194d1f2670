"""What running blocks costs: in floating-point operations, in hidden states, in time on this machine."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul

from ..engine.passes import Pass
from ..model.architectures import ATTENTION, experts_per_token
from ..model.projections import Block, Decoder, Projection


MADE = 3  # tensors of a forward for each output of a projection, as large as it: of norms, activations, products
WIDEST = 3  # outputs of the widest projections that exist together: gate, up, and their product

Costs = tuple[int, int, int]  # floating-point operations of a block on one sequence, for each entry of `Runs`


@dataclass(frozen=True)
class PlannedSweep:
    """One pass over the blocks.

    Args:
        label (`str`): what the progress bar calls it.
        plans (`int`): how many sparsity plans it tries; 0 if it runs the dense model only.
        block_forwards (`int`): how often it runs a block on one sequence, counted as `PruningReport` does.
        operations (`int`): floating-point operations of these runs, and of the head where logits are compared.
        compared (`int`): logits that are compared with the dense model's.
        ranked, masked (`int`): weights that are sorted by saliency, and weights that a mask is made for.
        made (`int`): values that blocks compute one by one, beside matrix products.
    """

    label: str
    plans: int
    block_forwards: int
    operations: int
    compared: int = 0
    ranked: int = 0
    masked: int = 0
    made: int = 0


def plan_sweeps(
    passes: Sequence[Pass], decoder: Decoder, tokens: int, samples: int, alignment: int
) -> tuple[PlannedSweep, ...]:
    """The cost of every pass, if no candidate is abandoned.

    Args:
        passes (`Sequence[Pass]`): from [`planned_passes`].
        decoder ([`Decoder`]): may be on the meta device.
        tokens (`int`): of a sequence.
        samples, alignment (`int`): all calibration sequences, and those that trials are measured on.
    """
    costs = [block_operations(decoder, block, tokens) for block in decoder.blocks]
    values = [block_values(decoder, block, tokens) for block in decoder.blocks]
    weights = sum(block.numel for block in decoder.blocks)
    planned = []
    for step in passes:
        count = step.count_sequences(samples, alignment)
        sequences = count * step.times
        runs = [step.runs(index, len(costs) - 1) for index in range(len(costs))]
        back = 2 * step.gradients  # ways back, in runs
        operations = sequences * sum(
            back * whole + sum(map(mul, own, (whole, *others))) for own, (whole, *others) in zip(runs, costs)
        )
        logits = sequences * tokens * _vocabulary(decoder) * step.distributions
        planned.append(
            PlannedSweep(
                step.label,
                step.plans * step.times,
                block_forwards=sequences * sum(map(sum, runs)),
                operations=operations + 2 * decoder.config.hidden_size * logits,
                compared=logits,
                ranked=weights * step.rankings * step.times,
                masked=weights * step.count_masks(count) * step.times,
                made=sequences * sum((back + whole + inner) * made for (whole, inner, _), made in zip(runs, values)),
            )
        )
    return tuple(planned)


def _vocabulary(decoder: Decoder) -> int:
    return getattr(decoder.config, "vocab_size", 0) or 0


def hidden_sequences(passes: Sequence[Pass], samples: int, alignment: int, blocks: int) -> int:
    """Sequences whose hidden states exist at a time, at most. Arguments: [`plan_sweeps`]."""
    return max((step.hidden_sequences(samples, alignment, blocks > 1) for step in passes), default=0)


def block_operations(decoder: Decoder, block: Block, tokens: int) -> Costs:
    """Floating-point operations of a block on one sequence: whole, without output projections, without any.

    Args:
        decoder ([`Decoder`]), block ([`Block`]): may be on the meta device.
        tokens (`int`): of the sequence.
    """
    projections = inner = 0
    for projection in block.projections.values():
        operations = _received(decoder, projection, 2 * tokens * projection.numel)
        projections += operations
        inner += 0 if decoder.feeds_next_block(block, projection) else operations
    full = any(p.role in ATTENTION for p in block.projections.values())
    attention = 4 * tokens**2 * decoder.config.hidden_size if full else 0
    return projections + attention, inner + attention, attention


def block_values(decoder: Decoder, block: Block, tokens: int) -> int:
    """Values that a block computes one by one on one sequence, about. Arguments: [`block_operations`]."""
    projections = block.projections.values()
    return MADE * sum(_received(decoder, projection, tokens * projection.shape[0]) for projection in projections)


def _received(decoder: Decoder, projection: Projection, amount: int) -> int:
    """What a projection does of an amount that is for all tokens: of a token's experts, each one its share."""
    per_token = experts_per_token(decoder.config)
    if projection.expert is None or per_token is None:
        return amount
    return amount * per_token // len(projection.owner)


def forward_bytes(decoder: Decoder, tokens: int, itemsize: int) -> int:
    """What a block's forward holds beside its inputs and outputs: about what its widest projections put out.

    Args:
        decoder ([`Decoder`]): may be on the meta device.
        tokens (`int`): of a batch.
        itemsize (`int`): bytes of a value.
    """
    widest = max((p.shape[0] for p in decoder.projections.values()), default=0)
    return tokens * itemsize * WIDEST * max(widest, decoder.config.hidden_size)
