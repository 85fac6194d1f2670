"""Tells what a prune would do and cost, from the model's config alone: no weight and no text is read."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ..checkpoint.sparsity_config import read_sparsity_config
from ..config import NeuronALConfig
from ..data.calibration import resolve_seq_length
from ..decoder.finding import check_model, find_decoder
from ..decoder.placement import default_device
from ..decoder.projections import Block, Decoder, Projection
from ..metrics.statistics import SquaredNorms
from ..runtime.tables import format_table
from ..sparsity.plan import row_counts
from ..topup.base import Pass


EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_topk", "moe_k")  # what configs call it
ATTENTION = ("query", "gated_query", "qkv", "interleaved_qkv", "partitioned_qvk")  # roles where every token meets all
MEASURE_SECONDS = 0.5

# How often one block runs on a sequence: whole; without what only feeds its output; without any projection.
Runs = tuple[int, int, int]
Costs = tuple[int, int, int]  # floating-point operations of each


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


@dataclass(frozen=True)
class PrunePlan:
    """What a prune would do and cost. `print(plan)` shows it as a table.

    Args:
        config (`dict`): the `NeuronALConfig`.
        model_type (`str`): the family of the decoder.
        dtype (`str`): of the weights and the hidden states: `"bfloat16"`.
        seq_length (`int`): tokens per calibration sequence.
        blocks, projections (`int`): decoder blocks, and pruned projections in them (every expert's counts).
        weights, pruned_weights (`int`): weights of the whole model, tied ones once, and of the pruned projections.
        zeros (`int`):
            How many of the latter become zero. A few more or less with a top-up that spreads sparsity unevenly: each
            matrix is rounded by itself.
        saved_bytes (`int`): the saved model in the dense format, as large as the unpruned one; without file headers.
        model_bytes (`int`): the model in memory.
        block_bytes (`int`): the largest block.
        outside_bytes (`int`): the part of the model outside its blocks, in memory: embeddings, head.
        trial_bytes (`int`): the second copy of a block's pruned weights that a trial computes with, at its largest.
        hidden_bytes (`int`): hidden states of calibration sequences, at their most.
        mask_bytes (`int`): the masks, one bit per pruned weight.
        sweeps (`tuple[PlannedSweep, ...]`): passes over the blocks in their order; none if nothing is measured.
        device (`str`): where the rate was measured.
        operations_per_second (`float`): measured rate of matrix products in this dtype on this device.
    """

    config: dict[str, Any]
    model_type: str
    dtype: str
    seq_length: int
    blocks: int
    projections: int
    weights: int
    pruned_weights: int
    zeros: int
    saved_bytes: int
    model_bytes: int
    block_bytes: int
    outside_bytes: int
    trial_bytes: int
    hidden_bytes: int
    mask_bytes: int
    sweeps: tuple[PlannedSweep, ...]
    device: str
    operations_per_second: float

    @property
    def memory_bytes(self) -> int:
        """Model, trial weights, hidden states and masks together: at least this much is needed."""
        return self.model_bytes + self.trial_bytes + self.hidden_bytes + self.mask_bytes

    @property
    def streamed_bytes(self) -> int:
        """The same with the blocks' weights on disk, of which two blocks are in memory at a time."""
        in_memory = min(self.model_bytes, self.outside_bytes + 2 * self.block_bytes)
        return self.memory_bytes - self.model_bytes + in_memory

    @property
    def block_forwards(self) -> int:
        """How often a block is run on one sequence; fewer if the top-up abandons candidates early."""
        return sum(sweep.block_forwards for sweep in self.sweeps)

    @property
    def operations(self) -> int:
        """Floating-point operations of all block forwards."""
        return sum(sweep.operations for sweep in self.sweeps)

    @property
    def seconds(self) -> float:
        """Time of these operations at the measured rate: a lower bound, unless candidates are abandoned early."""
        return self.operations / self.operations_per_second

    def to_dict(self) -> dict[str, Any]:
        """All of it with the totals, JSON-serialisable."""
        totals = ("memory_bytes", "streamed_bytes", "block_forwards", "operations", "seconds")
        sweeps = [asdict(sweep) for sweep in self.sweeps]
        return {**asdict(self), "sweeps": sweeps, **{name: getattr(self, name) for name in totals}}

    def __str__(self) -> str:
        """A table for the terminal."""
        config = self.config
        rows = [
            ["model", f"{self.model_type}, {_number(self.weights)} weights in {self.dtype}"],
            ["method", f"{config['saliency']} + {config['topup']}, sparsity {config['sparsity']:.2%}"],
            [
                "pruned",
                f"{self.projections:,} projections in {self.blocks} blocks, {_number(self.pruned_weights)} weights",
            ],
            ["become zero", f"{_number(self.zeros)} weights, {self.zeros / self.weights:.2%} of the model's"],
            ["saved model", _bytes(self.saved_bytes)],
            ["memory", f"at least {_bytes(self.memory_bytes)}, of which"],
            ["  model", f"{_bytes(self.model_bytes)} (largest block {_bytes(self.block_bytes)})"],
            ["  trial weights", _bytes(self.trial_bytes)],
            ["  hidden states", _bytes(self.hidden_bytes)],
            ["  masks", _bytes(self.mask_bytes)],
            ["memory, blocks on disk", f"at least {_bytes(self.streamed_bytes)} (--stream)"],
        ]
        if not self.sweeps:
            rows.append(["passes over the blocks", "none: no calibration data is needed"])
            return format_table(["", "plan"], rows)
        samples = f"{config['num_samples']} x {self.seq_length} tokens"
        rows.append(["calibration", f"{samples}, the first {config['num_alignment_samples']} for the top-up"])
        rows.append(["passes over the blocks", f"{len(self.sweeps)}, {_number(self.block_forwards)} block forwards"])
        for sweep in self.sweeps:
            plans = f", {sweep.plans} plan{'s' if sweep.plans > 1 else ''}" if sweep.plans else ""
            rows.append([f"  {sweep.label.lower()}", f"{_number(sweep.block_forwards)} block forwards{plans}"])
        rate = f"{self.operations:.2e} operations at the {self.operations_per_second:.2e} per second measured"
        rows.append(["time", f"at least {_duration(self.seconds)}: {rate} on {self.device}"])
        rows.append(["", "not counted: scoring, reading, saving; candidates that are abandoned early save some"])
        return format_table(["", "plan"], rows)


def plan_prune(
    model_or_path: str | Path,
    config: NeuronALConfig,
    dtype: str | torch.dtype = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    device: torch.device | None = None,
) -> PrunePlan:
    """What [`NeuronALPruner.prune`] would do and cost, told from the model's config, without its weights.

    Args:
        model_or_path (`str` or `Path`): Hub id or directory of the dense model; of its files only the config is read.
        config ([`NeuronALConfig`]): how to prune.
        dtype (`str` or `torch.dtype`): of the weights; `"auto"`: what the model's config says, or float32.
        revision (`str`, *optional*): branch, tag or commit of the model on the Hub.
        trust_remote_code (`bool`): whether to run code that comes with the model.
        device (`torch.device`, *optional*): whose speed is measured. None: the accelerator, or the CPU.

    Raises:
        `ValueError`, `TypeError`, `OSError`: as the prune itself, as far as they can be known without weights.
    """
    model = _skeleton(model_or_path, dtype, revision or "main", trust_remote_code)
    decoder = find_decoder(model, config.targets, config.ignore)
    methods = config.make_methods()
    saliency, topup = methods.saliency, methods.topup
    topup.check(decoder)
    tokens = resolve_seq_length(model.config, config.seq_length)
    calibrated = methods.needs_calibration
    reads_inputs = saliency.uses_activations or topup.statistic is not SquaredNorms  # the final pruning
    passes = topup.passes() if calibrated else ()
    projections = decoder.projections.values()
    device = device or default_device()
    sequences = _hidden_sequences(config, passes, len(decoder.blocks), reads_inputs)
    return PrunePlan(
        config=config.to_dict(),
        model_type=decoder.config.model_type,
        dtype=str(model.dtype).removeprefix("torch."),
        seq_length=tokens,
        blocks=len(decoder.blocks),
        projections=len(projections),
        weights=sum(weight.numel() for weight in model.parameters()),
        pruned_weights=sum(_weights(projection) for projection in projections),
        zeros=sum(_zeros(config.sparsity, projection.shape) for projection in projections),
        **_weight_bytes(model, decoder),
        trial_bytes=max(_trial_bytes(block) for block in decoder.blocks) if calibrated else 0,
        hidden_bytes=sequences * tokens * decoder.config.hidden_size * model.dtype.itemsize,
        mask_bytes=sum(-(-_weights(projection) // 8) for projection in projections),
        sweeps=_plan_sweeps(config, decoder, passes, tokens, reads_inputs) if calibrated else (),
        device=str(device),
        operations_per_second=measure_matmul_rate(model.dtype, device),
    )


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


def _skeleton(
    model_or_path: str | Path, dtype: str | torch.dtype, revision: str, trust_remote_code: bool
) -> PreTrainedModel:
    """The model on the meta device: shapes and dtypes without weights."""
    config = AutoConfig.from_pretrained(model_or_path, revision=revision, trust_remote_code=trust_remote_code)
    if read_sparsity_config(config) is not None:
        raise ValueError("The model is sparse already (its config has a sparsity_config): plan with the dense model.")
    if dtype == "auto":
        dtype = config.dtype or config.get_text_config(decoder=True).dtype or torch.float32
    known = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(known, torch.dtype) or not known.is_floating_point:
        raise ValueError(f"dtype is {dtype!r}: expected 'auto', 'float32', 'bfloat16' or 'float16'.")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=known, trust_remote_code=trust_remote_code)
    check_model(model)
    return model


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _weights(projection: Projection) -> int:
    return projection.shape[0] * projection.shape[1]


@cache
def _zeros(sparsity: float, shape: tuple[int, int]) -> int:
    return int(row_counts(sparsity, shape).sum())


def _weight_bytes(model: PreTrainedModel, decoder: Decoder) -> dict[str, int]:
    """The fields of the plan about the model's own weights, tied ones once."""
    saved = {id(tensor): tensor for tensor in model.state_dict(keep_vars=True).values()}
    blocks = [sum(_size(weight) for weight in block.module.parameters()) for block in decoder.blocks]
    in_memory = model.get_memory_footprint()  # with the buffers that are not saved
    return {
        "saved_bytes": sum(_size(tensor) for tensor in saved.values()),
        "model_bytes": in_memory,
        "block_bytes": max(blocks),
        "outside_bytes": in_memory - sum(blocks),
    }


def _trial_bytes(block: Block) -> int:
    """Bytes of the weights that `trial_weights` makes anew: of experts all, if one of them is pruned."""
    return sum(_size(owner) for owner in {projection.owner for projection in block.pruned})


def _hidden_sequences(config: NeuronALConfig, passes: Sequence[Pass], blocks: int, prunes_by_activations: bool) -> int:
    """Sequences whose hidden states exist at a time, at most: the first block's inputs, which are kept throughout;
    from the second block on, the inputs of every stream; and its outputs."""
    deep = blocks > 1

    def streams(step: Pass) -> int:
        if step.measures == "training" or (step.measures == "reconstruction" and step.reference == "dense"):
            return (2 if step.measures == "training" else 1) * (2 if deep else 1)
        if (
            step.measures == "deviation" and step.reference != "dense"
        ):  # two, and what the search for the dense input puts out
            return 5 if deep else 2
        return max(step.plans, 1) * (2 if deep else 1)

    def kept(step: Pass) -> int:  # the first block's inputs; of the dense model's stream also the last block's output
        return 2 if step.reference == "dense" else 1

    trials = [step for step in passes if step.measures != "scores"]
    needed = [config.num_alignment_samples * kept(step) + _sequences(config, step) * streams(step) for step in trials]
    if prunes_by_activations or any(step.measures == "scores" for step in passes):
        needed.append(config.num_samples * 2)  # the first block's inputs are let go
    return max(needed, default=0)


def _sequences(config: NeuronALConfig, step: Pass) -> int:
    return min(step.sequences or config.num_alignment_samples, config.num_alignment_samples)


def _plan_sweeps(
    config: NeuronALConfig, decoder: Decoder, passes: Sequence[Pass], tokens: int, prunes_by_activations: bool
) -> tuple[PlannedSweep, ...]:
    """What [`Sweep`] does from its check to the final masks, if no candidate is abandoned."""
    costs = [_operations(decoder, block, tokens) for block in decoder.blocks]
    last = len(costs) - 1
    sweeps = [_planned("Check", 0, 1, costs, lambda index: (1, 0, 0))]
    dense_is_known = False

    def errors(step: Pass) -> Callable[[int], Runs]:
        def runs(index: int) -> Runs:
            dense = 0 if step.reference == "dense" else 1 if index == 0 else step.plans
            return (0, dense + step.plans, 0) if index == last else (step.plans, dense, 0)

        return runs

    def outputs(step: Pass) -> Callable[[int], Runs]:
        again = step.reference != "dense"
        return lambda index: (step.plans, (1 if index == 0 else step.plans) * again, 0)

    def reconstructions(step: Pass) -> Callable[[int], Runs]:
        if step.reference == "dense":
            return lambda index: (1, 0, 0)
        return lambda index: (step.plans * (index < last), 1 if index == 0 else step.plans, 0)

    def training(step: Pass) -> Callable[[int], Runs]:  # the way back through the block is not counted
        return lambda index: (1 + step.plans + (index < last), 1, 0)

    def deviation(step: Pass) -> Callable[[int], Runs]:
        return lambda index: (1, 0, 0) if step.reference == "dense" else (2, 0, int(index > 0))

    kinds = {
        "alignment": errors,
        "deviation": deviation,
        "output": outputs,
        "reconstruction": reconstructions,
        "training": training,
    }
    for step in passes:
        if step.measures == "scores":
            sweeps.append(_planned(step.label, 0, config.num_samples, costs, lambda _: (1, 0, 0)))
            continue
        needs_dense = step.measures == "output" or (step.reference == "dense" and step.measures != "reconstruction")
        if needs_dense and not dense_is_known:
            sweeps.append(_planned("Dense activations", 0, config.num_alignment_samples, costs, lambda _: (1, 0, 0)))
            dense_is_known = True
        if step.plans:
            runs = kinds[step.measures](step)
            sequences = _sequences(config, step) * step.times
            sweeps.append(_planned(step.label, step.plans * step.times, sequences, costs, runs))
    if prunes_by_activations:
        sweeps.append(_planned("Pruning", 1, config.num_samples, costs, lambda index: (int(index < last), 1, 0)))
    return tuple(sweeps)


def _planned(
    label: str, plans: int, sequences: int, costs: Sequence[Costs], runs: Callable[[int], Runs]
) -> PlannedSweep:
    by_block = [runs(index) for index in range(len(costs))]
    operations = sum(count * cost for counts, block in zip(by_block, costs) for count, cost in zip(counts, block))
    return PlannedSweep(label, plans, sequences * sum(map(sum, by_block)), sequences * operations)


def _operations(decoder: Decoder, block: Block, tokens: int) -> Costs:
    """Floating-point operations of a block on one sequence: whole, without output projections, without any."""
    asked = (getattr(decoder.config, name, None) for name in EXPERTS_PER_TOKEN)
    per_token = next((max(value) if isinstance(value, list) else value for value in asked if value), None)
    projections = inner = 0
    for projection in block.projections.values():
        operations = 2 * tokens * _weights(projection)
        if projection.expert is not None and per_token is not None:  # of a token's experts, each one's share
            operations = operations * per_token // len(projection.owner)
        projections += operations
        inner += 0 if decoder.feeds_next_block(block, projection) else operations
    full = any(p.role in ATTENTION for p in block.projections.values())
    attention = 4 * tokens**2 * decoder.config.hidden_size if full else 0
    return projections + attention, inner + attention, attention


def _number(value: int) -> str:
    for unit, name in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if value >= unit:
            return f"{value / unit:.2f} {name}"
    return f"{value:,}"


def _bytes(value: int) -> str:
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= unit:
            return f"{value / unit:.2f} {name}"
    return f"{value} bytes"


def _duration(seconds: float) -> str:
    for unit, name in ((3600, "hours"), (60, "minutes")):
        if seconds >= unit:
            return f"{seconds / unit:.1f} {name}"
    return f"{seconds:.2g} seconds"
