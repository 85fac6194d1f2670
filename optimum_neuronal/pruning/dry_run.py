"""A dry run: what a prune would do, and roughly what it would cost. No weight and no text is read."""

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..blocks.block_inputs import Call, Streams, inference
from ..blocks.runner import BlockRunner
from ..common.display import format_bytes, format_count, format_duration, format_table
from ..common.machine import default_device, time_on
from ..compat import hf_private
from ..config.neuronal_config import NeuronALConfig
from ..data.calibration import resolve_seq_length
from ..model.change import NewWeight
from ..model.load_model import check_unquantized, load_skeleton
from ..model.projections import Block, Decoder
from ..report import method_text
from ..saliency.plan import Plan
from ..saliency.prune_projections import prune_projections
from ..topup.base import uniform_plan
from .context import PruneContext, check, with_refit_dtype
from .refit import RUNS, Refit
from .reporting import PackedSize, packed_size


@dataclass(frozen=True, repr=False)
class PrunePlan:
    """The work and the rough cost of a prune. `print(plan)` shows it as a table."""

    context: PruneContext
    size: PackedSize
    bytes_saved: int  # in the packed format
    hidden_bytes: int  # of the calibration sequences' hidden states
    block_forwards: int  # on one sequence, roughly
    seconds: float  # roughly

    def __repr__(self) -> str:
        config, decoder, model = self.context.config, self.context.decoder, self.context.model
        weights = format_count(sum(weight.numel() for weight in model.parameters()))
        amount = f"{config.sparsity:.2%} zeros"
        in_memory = model.get_memory_footprint()
        packed, dtype = format_bytes(in_memory - self.bytes_saved), str(model.dtype).removeprefix("torch.")
        rows = [
            ["model", f"{decoder.config.model_type}, {weights} weights"],
            ["method", method_text(config.to_dict())],
            ["pruned", f"{len(decoder.projections):,} projections in {len(decoder.blocks)} blocks: {amount}"],
            [f"size in {dtype}", f"{format_bytes(in_memory)}, packed {packed}"],
            ["hidden states", format_bytes(self.hidden_bytes)],
            ["block forwards", f"about {format_count(self.block_forwards)}, each on one sequence"],
            ["time, a rough estimate", f"{format_duration(self.seconds)}, without evaluation, reading and saving"],
        ]
        return format_table(["", "plan"], rows)


def plan_prune(
    model_or_path: str | Path, config: NeuronALConfig, device: torch.device | None = None, **options: Any
) -> PrunePlan:
    """Return what a prune would do, and its rough cost. Only the checkpoint's config is read.

    A block is timed on `device`; `options` are for [`load_skeleton`]: `dtype`, `revision`, `trust_remote_code`.
    """
    check_unquantized(model_or_path, options)
    context = check(load_skeleton(model_or_path, **options), config, loaded=False)
    decoder, methods = context.decoder, context.methods
    size = packed_size(decoder, lambda p: int(config.sparsity * p.numel))
    saved = size.dense - size.saved
    hidden, forwards, seconds = 0, count_forwards(context), 0.0
    if methods.needs_calibration:
        tokens = resolve_seq_length(context.model.config, config.seq_length)
        sequence_bytes = tokens * decoder.config.hidden_size * context.model.dtype.itemsize
        hidden = (1 + (config.refit_epochs > 0)) * config.num_samples * sequence_bytes
        plan, fitted = uniform_plan(decoder, config.sparsity), count_refit_forwards(context)
        times = _time_block(context, config, plan, tokens, device or default_device())
        seconds = (forwards - fitted) * times.forward + fitted * times.refit_forward
        seconds += (1 + methods.topup.solves(methods.saliency)) * times.solve
    return PrunePlan(context, size, saved, hidden, forwards, seconds)


def count_forwards(context: PruneContext) -> int:
    methods, config, blocks = context.methods, context.config, len(context.decoder.blocks)
    aligned = min(config.num_alignment_samples, config.num_samples)
    runs = 2 * methods.needs_final_runs + (config.refit_epochs > 0)  # the dense model's stream runs beside a refit
    final = runs * config.num_samples * blocks + count_refit_forwards(context)
    return final + methods.topup.forwards(context.decoder, methods.saliency, aligned, config.num_samples)


def count_refit_forwards(context: PruneContext) -> int:
    return RUNS * context.config.refit_epochs * context.config.num_samples * len(context.decoder.blocks)


@dataclass
class BlockTimes:
    """Seconds of one block's work, at random weights."""

    forward: float = 0  # on one sequence
    refit_forward: float = 0  # the same in a refit, with a share of its steps
    solve: float = 0  # of all projections of the model


def _time_block(
    context: PruneContext, config: NeuronALConfig, plan: Plan, tokens: int, device: torch.device
) -> BlockTimes:
    decoder, methods = context.decoder, context.methods
    runner = BlockRunner(_one_block(decoder, device), 1, device)
    counts = Counter(projection.shape for projection in decoder.projections.values())
    refit = Refit.of(with_refit_dtype(config, runner.decoder))
    sequences, times = 1 if refit is None else 2, BlockTimes()

    def visit(index: int, block: Block, calls: Sequence[Call], streams: Streams) -> Streams:
        stream, start = streams[0], time_on(device)
        norms = runner.inputs_of(block, stream, calls, methods.saliency.statistic)
        times.forward = (time_on(device) - start) / sequences
        for shape, projection in {projection.shape: projection for projection in block.pruned}.items():
            start = time_on(device)
            prune_projections(methods.saliency, [projection], norms, plan, methods.pattern)
            times.solve += counts[shape] * (time_on(device) - start)
        if refit is not None:
            unchanged, start = {p.name: NewWeight(p.weight) for p in block.pruned}, time_on(device)
            replace(refit, epochs=1).fit(block, unchanged, {}, stream, stream, calls)
            runs = RUNS + 2  # one step, and the other sequence before and after it
            times.refit_forward = (time_on(device) - start) / runs
        return streams

    with inference(runner.decoder.model):
        runner.run(runner.capture(torch.ones(sequences, tokens, dtype=torch.int64)), 1, visit, release=True)
    return times


def _one_block(decoder: Decoder, device: torch.device) -> Decoder:
    """Return a copy of a decoder that runs only the block with the most pruned projections, at random weights."""
    copied = copy.deepcopy(decoder)
    index = max(range(len(copied.blocks)), key=lambda index: len(copied.blocks[index].pruned))
    modules = copied.model.get_submodule(copied.blocks[0].name.rpartition(".")[0])
    del modules[index + 1 :]  # blocks before it stay: some families compute each block by its index
    hf_private.randomize_weights(copied.model)
    copied.model.to(device).eval()
    return replace(copied, blocks=[copied.blocks[index]])
