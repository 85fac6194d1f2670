"""What running blocks costs: in floating-point operations, in hidden states, in time on this machine."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..decoder.architectures import ATTENTION, experts_per_token
from ..decoder.projections import Block, Decoder
from ..engine.passes import Pass


MEASURE_SECONDS = 0.5

Costs = tuple[int, int, int]  # floating-point operations of a block on one sequence, for each entry of `Runs`


@dataclass(frozen=True)
class PlannedSweep:
    """One pass over the blocks.

    Args:
        label (`str`): what the progress bar calls it.
        plans (`int`): how many sparsity plans it tries; 0 if it runs the dense model only.
        block_forwards (`int`): how often it runs a block on one sequence, counted as `PruningReport` does.
        operations (`int`): floating-point operations of these runs.
    """

    label: str
    plans: int
    block_forwards: int
    operations: int


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
    planned = []
    for step in passes:
        sequences = step.count_sequences(samples, alignment) * step.times
        runs = [step.runs(index, len(costs) - 1) for index in range(len(costs))]
        operations = sum(count * cost for block in zip(runs, costs) for count, cost in zip(*block))
        forwards = sequences * sum(map(sum, runs))
        planned.append(PlannedSweep(step.label, step.plans * step.times, forwards, sequences * operations))
    return tuple(planned)


def hidden_sequences(passes: Sequence[Pass], samples: int, alignment: int, blocks: int) -> int:
    """Sequences whose hidden states exist at a time, at most. Arguments: [`plan_sweeps`]."""
    return max((step.hidden_sequences(samples, alignment, blocks > 1) for step in passes), default=0)


def block_operations(decoder: Decoder, block: Block, tokens: int) -> Costs:
    """Floating-point operations of a block on one sequence: whole, without output projections, without any.

    Args:
        decoder ([`Decoder`]), block ([`Block`]): may be on the meta device.
        tokens (`int`): of the sequence.
    """
    per_token = experts_per_token(decoder.config)
    projections = inner = 0
    for projection in block.projections.values():
        operations = 2 * tokens * projection.shape[0] * projection.shape[1]
        if projection.expert is not None and per_token is not None:  # of a token's experts, each one's share
            operations = operations * per_token // len(projection.owner)
        projections += operations
        inner += 0 if decoder.feeds_next_block(block, projection) else operations
    full = any(p.role in ATTENTION for p in block.projections.values())
    attention = 4 * tokens**2 * decoder.config.hidden_size if full else 0
    return projections + attention, inner + attention, attention


def measure_matmul_rate(dtype: torch.dtype, device: torch.device, seconds: float = MEASURE_SECONDS) -> float:
    """The best rate of square matrix products seen in about so many seconds, in floating-point operations per second.

    Args:
        dtype (`torch.dtype`): of the matrices.
        device (`torch.device`): where they lie.
        seconds (`float`): how long to measure; one product is always finished.
    """
    size, best, end = 128, 0.0, time.perf_counter() + seconds
    matrix = torch.ones(size, size, dtype=dtype, device=device)
    while not best or time.perf_counter() < end:
        _wait_for(device)
        start = time.perf_counter()
        matrix @ matrix
        _wait_for(device)
        elapsed = time.perf_counter() - start
        best = max(best, 2 * size**3 / elapsed)
        if elapsed < seconds / 100 and size < 8192:  # large enough to keep the device busy, small enough to repeat
            size *= 2
            matrix = torch.ones(size, size, dtype=dtype, device=device)
    return best


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
