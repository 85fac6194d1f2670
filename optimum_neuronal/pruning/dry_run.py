"""A dry run: what a prune would do, and roughly what it would cost. No weight and no text is read."""

import copy
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..blocks.block_inputs import Call, Streams, inference
from ..blocks.runner import BlockRunner
from ..common.display import format_bytes, format_count, format_duration, format_table
from ..common.machine import default_device
from ..compat import hf_private
from ..config.neuronal_config import NeuronALConfig
from ..data.calibration import resolve_seq_length
from ..model.load_model import load_skeleton
from ..model.projections import Block, Decoder
from ..report import method_text
from ..saliency.plan import SparsityPlan
from ..saliency.prune_projections import prune_projections
from ..topup.rates import Rates
from .context import PruneContext, check
from .refit import RUNS
from .reporting import expected_size


@dataclass(frozen=True)
class PrunePlan:
    """The work and the rough cost of a prune. `print(plan)` shows it as a table."""

    config: dict[str, Any]
    model_type: str
    dtype: str
    seq_length: int
    blocks: int
    projections: int
    weights: int  # tied ones count once
    pruned_weights: int
    model_bytes: int
    packed_bytes: int
    bits_per_weight: float
    hidden_bytes: int  # of the calibration sequences' hidden states
    block_forwards: int  # on one sequence, roughly
    seconds: float  # roughly, without a rotation, reading and saving
    device: str

    def __str__(self) -> str:
        config, projections = self.config, f"{self.projections:,} projections in {self.blocks} blocks"
        sparsity = config["sparsity"]
        amount = f"{self.bits_per_weight:.3f} bits per weight" if sparsity is None else f"{sparsity:.2%} zeros"
        rows = [
            ["model", f"{self.model_type}, {format_count(self.weights)} weights in {self.dtype}"],
            ["method", method_text(config)],
            ["pruned", f"{projections}, {format_count(self.pruned_weights)} weights: {amount}"],
            ["size", f"{format_bytes(self.model_bytes)}, packed {format_bytes(self.packed_bytes)}"],
            ["hidden states", format_bytes(self.hidden_bytes)],
            ["block forwards", f"about {format_count(self.block_forwards)}, of {self.seq_length} tokens each"],
            ["time, rough", f"{format_duration(self.seconds)} on {self.device}, without rotation, reading and saving"],
        ]
        return format_table(["", "plan"], rows)


def plan_prune(
    model_or_path: str | Path, config: NeuronALConfig, device: torch.device | None = None, **options: Any
) -> PrunePlan:
    """Return what a prune would do, and its rough cost. Only the checkpoint's config is read.

    A block is timed on `device`; `options` are for [`load_skeleton`]: `dtype`, `revision`, `trust_remote_code`.
    """
    context = check(load_skeleton(model_or_path, **options), config, loaded=False)
    decoder, model, device = context.decoder, context.model, device or default_device()
    tokens, projections = resolve_seq_length(model.config, config.seq_length), decoder.projections.values()
    needed, streams = context.methods.needs_calibration, 1 + context.methods.needs_dense_stream
    forwards, size, in_memory = count_forwards(context), expected_size(context), model.get_memory_footprint()
    sequence_bytes = tokens * decoder.config.hidden_size * model.dtype.itemsize
    forward, solve = _time_block(context, tokens, device) if needed else (0.0, 0.0)
    return PrunePlan(
        config=config.to_dict(),
        model_type=decoder.config.model_type,
        dtype=str(model.dtype).removeprefix("torch."),
        seq_length=tokens,
        blocks=len(decoder.blocks),
        projections=len(projections),
        weights=sum(weight.numel() for weight in model.parameters()),
        pruned_weights=sum(projection.numel for projection in projections),
        model_bytes=in_memory,
        packed_bytes=in_memory - size.dense + size.saved,
        bits_per_weight=expected_size(context, head=False).bits_per_weight,
        hidden_bytes=streams * config.num_samples * sequence_bytes if needed else 0,
        block_forwards=forwards,
        seconds=forwards * forward + (1 + context.methods.topup.solves(context.methods.saliency)) * solve,
        device=str(device),
    )


def count_forwards(context: PruneContext) -> int:
    methods, config, blocks = context.methods, context.config, len(context.decoder.blocks)
    aligned = min(config.num_alignment_samples, config.num_samples)
    # Runs of a block on one sequence: 5 if weights are fitted to the dense model's outputs, otherwise 2.
    runs = 5 if methods.needs_dense_stream else 2 * methods.needs_final_runs
    final = (runs + RUNS * config.refit_epochs) * config.num_samples * blocks
    return final + methods.topup.forwards(context.decoder, methods.saliency, aligned, config.num_samples)


def _time_block(context: PruneContext, tokens: int, device: torch.device) -> tuple[float, float]:
    """Return seconds of a block's forward on one sequence, and of one solve of all projections, at random weights."""
    decoder, names, topup = _one_block(context.decoder, device), context.decoder.projections, context.methods.topup
    runner, saliency = BlockRunner(decoder, 1, device, quiet=True), context.methods.saliency
    uniform = SparsityPlan(dict.fromkeys(names, context.config.sparsity or 0.0))
    plan = topup.even(context.decoder) if isinstance(topup, Rates) else uniform
    seconds: list[float] = []

    def visit(index: int, own: Block, calls: Sequence[Call], streams: Streams) -> Streams:
        start = _now(device)
        norms = runner.inputs_of(own, streams[0], calls, saliency.statistic)
        seconds.append(_now(device) - start)
        counts = Counter(projection.shape for projection in names.values())
        for shape, projection in {projection.shape: projection for projection in own.pruned}.items():
            start = _now(device)
            prune_projections(saliency, [projection], norms, plan, context.methods.pattern)
            seconds.append(counts[shape] * (_now(device) - start))
        return streams

    with inference(decoder.model):
        runner.run(runner.capture(torch.ones(1, tokens, dtype=torch.int64)), 1, visit, release=True)
    return seconds[0], sum(seconds[1:])


def _one_block(decoder: Decoder, device: torch.device) -> Decoder:
    """Return a copy of a decoder with one pruned block, at random weights."""
    copied = copy.deepcopy(decoder)
    index = next(index for index, block in enumerate(copied.blocks) if block.pruned)
    modules = copied.model.get_submodule(copied.blocks[0].name.rpartition(".")[0])
    del modules[index + 1 :], modules[:index]
    hf_private.randomize_weights(copied.model)
    copied.model.to(device).eval()
    return replace(copied, blocks=[copied.blocks[index]])


def _now(device: torch.device) -> float:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()
