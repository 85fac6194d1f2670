"""One pruning run: the top-up's plan, the blocks one by one, the report; at the very end the weights change."""

import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ..blocks.block_inputs import BlockInputs, Call, Stream, Streams, limited
from ..blocks.offload import change_offloaded
from ..blocks.statistics import SquaredNorms
from ..common.display import display_name
from ..common.notes import get_logger
from ..common.torch_state import inference, peak_memory
from ..compat.hf_private import is_offloaded
from ..files.records import Finding, versions
from ..model.change import Change, NewWeight, PackedChange
from ..model.origin import hub_id
from ..model.projections import Block, Decoder, trial_weights
from ..model.sparsity import Sparsity, describe_sparsity, measure_sparsity, packed_size, record_sparsity
from ..report import PruningReport
from ..saliency import Inputs
from ..saliency.base import check_finite
from ..saliency.plan import Plan
from ..topup import Allocation
from ..trials import Cache, PlanEvaluator
from ..trials.output_errors import compare_outputs
from .importance import feature_importance
from .prepare import Clock, PruneContext
from .refit import RUNS, Refit, first_zeros


logger = get_logger(__name__)

PROGRESS = "pruning, block by block"
COMPARED = 2  # held-out sequences on which the pruned model is compared with the dense one


@dataclass(frozen=True)
class PruneOutcome:
    """The top-up's allocation and the change of each projection's weight, by name."""

    allocation: Allocation
    changes: dict[str, Change]
    block_forwards: int
    starved_experts: list[str]
    divergence: dict[str, float]


def prune_model(context: PruneContext) -> PruningReport:
    """Prune the model of a context, in place. A failure or an interruption leaves it as it was."""
    decoder = context.decoder
    outcome = find_changes(context)
    report = make_report(context, outcome)
    sparsity_config = make_sparsity_config(decoder, report)
    with deferred_interrupt():
        apply_changes(decoder, outcome.changes)  # nothing that may fail from here on
        record_sparsity(context.model, sparsity_config)
    return report


def find_changes(context: PruneContext) -> PruneOutcome:
    """Find the changes of all weights, without making them (the paper's Algorithm 1)."""
    config, methods, evaluator = context.config, context.methods, context.evaluator
    runner, ids = evaluator.runner, evaluator.ids
    with inference(context.model):
        if methods.needs_calibration:
            evaluator.cache.once("replay is right", partial(runner.check_replay, ids[:1]))
        context.clock.lap("calibration data")
        allocation = methods.topup.allocate(evaluator, config.sparsity)
        context.clock.lap("allocation")
        refit = None
        if config.refit_epochs:
            dtype = getattr(torch, context.refit_dtype or "float32")
            measured = evaluator.records.recorded("importance", lambda: ({}, feature_importance(runner, ids)))
            refit = Refit(config.refit_epochs, config.refit_learning_rate, dtype, measured[1])
        changes, starved = prune_blocks(evaluator, allocation, refit, methods.topup.scores_dense, context.clock)
        context.clock.lap("pruning")
        forwards = runner.block_forwards
        divergences = measure_divergence(context, changes)
    return PruneOutcome(allocation, changes, forwards, starved, divergences)


def measure_divergence(context: PruneContext, changes: Mapping[str, Change]) -> dict[str, float]:
    """Return the report's `divergence`. Warn if the score alone, with the same sparsity everywhere, is better."""
    methods, calibration, calibrated = context.methods, context.calibration, replace(context.evaluator, cache=Cache())
    if calibration is None or calibration.held_out is None or not context.decoder.predicts_next_token:
        return {}
    ids = calibration.held_out[:COMPARED]
    evaluator, runner = replace(calibrated, ids=ids, num_alignment_samples=len(ids), cache=Cache()), calibrated.runner
    uniform, norms = [], []
    if methods.saliency.updates_weights or methods.topup.decides or context.config.refit_epochs:
        uniform = [Plan.uniform(context.decoder.projections, context.config.sparsity)]
        norms = calibrated.stream_of(uniform[0])[0]

    def visit(index: int, block: Block, calls: Sequence[Call], streams: Streams) -> Streams:
        ways = [lambda p: changes[p.name]]
        ways += calibrated.changes(block, norms[index], uniform, updates=False) if uniform else []
        outputs = []
        for way, stream in zip(ways, streams):
            with trial_weights(block.pruned, way):
                outputs.append(runner.output(block, stream, calls))
        return outputs

    streams = runner.run(evaluator.alignment_inputs(), 1 + len(uniform), visit, "comparing with the dense model")
    try:
        found = compare_outputs(evaluator, ids, evaluator.dense(SquaredNorms)[1], streams)
    except ValueError as error:  # the model is pruned all the same
        logger.warning(f"The pruned model could not be compared with the dense one. {error}")
        return {}
    context.clock.lap("evaluation")
    if found[0] > found[-1]:
        logger.warning(
            f"On held-out text, the pruned model is farther from the dense one (KL divergence {found[0]:.3f}) than one "
            f"pruned by score alone, with the same sparsity everywhere ({found[-1]:.3f}). Try another preset or method."
        )
    return dict(zip(("pruned", "by_score"), found))


def prune_blocks(
    evaluator: PlanEvaluator,
    allocation: Allocation,
    refit: Refit | None = None,
    scores_dense: bool = False,
    clock: Clock | None = None,
) -> tuple[dict[str, PackedChange], list[str]]:
    """Return the changes of weights by projection name, and the names of starved experts' projections.

    Each block receives the outputs of the pruned blocks before it; with `scores_dense`, the dense model's. For a
    refit, the dense model's stream runs beside the sparse one: each block is fitted to its output in the dense model.
    """
    evaluator, clock = replace(evaluator, norms=allocation.norms), clock or Clock()
    runner, blocks = evaluator.runner, evaluator.decoder.blocks
    inputs, streams = BlockInputs(calls=[[] for _ in blocks]), []
    if evaluator.saliency.uses_activations or allocation.refine:
        evaluator.cache.release()
        inputs = evaluator.capture_all(evaluator.statistic, refit and refit.batch_size(evaluator.ids.shape[1]))
        streams = [Stream(inputs.hidden)] * (1 if refit is None else 2)
        inputs.hidden = []  # freed after the first block
    changes: dict[str, PackedChange] = {}
    starved: list[str] = []
    for index in runner.progress(range(len(blocks)), PROGRESS):
        with runner.loaded(index) as block:
            calls = inputs.calls[index]
            streams = [*streams[:1], *(runner.output(block, stream, calls) for stream in streams[1:])]
            if block.pruned:
                value, tensors = evaluator.records.recorded(
                    f"block-{index:05d}",
                    partial(prune_block, evaluator, allocation, refit, block, calls, streams, clock),
                )
                starved += value["starved"]
                for p in block.pruned:  # changes of offloaded weights wait in CPU memory
                    device = torch.device("cpu") if is_offloaded(p.module) else p.weight.device
                    changes[p.name] = PackedChange.of_tensors(tensors, p.name, p.shape).to(device)
            if streams and index + 1 < len(blocks):  # nothing reads the last block's output
                with trial_weights([] if scores_dense else block.pruned, lambda p: changes[p.name]):
                    streams = [runner.output(block, streams[0], calls), *streams[1:]]
                streams = limited(streams, runner.max_hidden_bytes)
    return changes, starved


def prune_block(
    evaluator: PlanEvaluator,
    allocation: Allocation,
    refit: Refit | None,
    block: Block,
    calls: Sequence[Call],
    streams: Streams,
    clock: Clock,
) -> Finding:
    """Return the starved experts of a block, and the tensors of its changes, packed.

    `streams` are the hidden states that enter the block, unless only weights count, and for a refit its output in the dense
    model.
    """
    inputs, plan, pattern = Inputs(), allocation.plan, evaluator.pattern
    if streams:
        norms = evaluator.runner.inputs_of(block, streams[0], calls, evaluator.statistic)
        inputs = evaluator.inputs(block, evaluator.joined(norms, evaluator.statistic))
    adds = refit is not None and pattern is None  # the refit makes the last zeros
    first = first_zeros(plan, block.pruned) if adds else plan
    changes = evaluator.saliency.changes(block.pruned, inputs, first, pattern)
    clock.lap("pruning")
    if allocation.refine is not None:
        changes = allocation.refine(changes, block.pruned, inputs)
        clock.lap("allocation")
    check_finite({n: torch.isfinite(c.weight).all() for n, c in changes.items() if isinstance(c, NewWeight)})
    if refit is not None:
        evaluator.runner.block_forwards += RUNS * refit.epochs * streams[0].sequences
        hidden, expected = streams
        changes = refit.fit(block, changes, inputs.statistics, hidden, expected, calls, plan if adds else None)
    tensors: dict[str, torch.Tensor] = {}
    for p in block.pruned:
        tensors |= PackedChange.pack(changes[p.name], p.weight).tensors(p.name)
    return {"starved": list(inputs.starved)}, tensors


def make_report(context: PruneContext, outcome: PruneOutcome) -> PruningReport:
    """Return the report of a pruning run whose model has still dense weights."""
    decoder, config = context.decoder, context.config
    achieved, blocks, projections = measure_sparsity(decoder, outcome.changes)
    decisions = outcome.allocation.decisions
    values = config.to_dict() | {"refit_dtype": context.refit_dtype}
    passed = [context.dataset] if isinstance(context.dataset, str | os.PathLike) else []  # other data have no name
    names = [display_name(os.fspath(one)) for one in (config.dataset_names if context.dataset is None else passed)]
    values["dataset"] = names[0] if len(names) == 1 else names or None
    size = packed_size(decoder, lambda p: round(projections[p.name]["sparsity"] * p.numel))
    return PruningReport(
        config=values,
        method=context.methods.title,
        requested_sparsity=config.sparsity,
        achieved_sparsity=achieved,
        blocks=blocks,
        projections=projections,
        block_lambda=decisions.get("block", {}).get("lambda"),
        row_lambda=decisions.get("row", {}).get("lambda"),
        decisions=decisions,
        calibration={} if context.calibration is None else context.calibration.to_dict(),
        seconds=dict(context.clock.seconds),
        block_forwards=outcome.block_forwards,
        starved_experts=outcome.starved_experts,
        divergence=outcome.divergence,
        resumed=context.evaluator.records.resumed,
        peak_memory=peak_memory(),
        versions=versions(),
        bits_per_weight=size.bits_per_weight,
        gguf_file=getattr(decoder.model, "gguf_file", None),
        dtype=str(context.model.dtype).removeprefix("torch."),
    )


def make_sparsity_config(decoder: Decoder, report: PruningReport) -> dict[str, Any]:
    """Return what a pruned model's config keeps of the report."""
    return describe_sparsity(
        decoder,
        Sparsity(report.achieved_sparsity, report.blocks, report.projections),
        base_model=hub_id(decoder.model),
        method=report.method,
        sparsity=report.requested_sparsity,
        block_lambda=report.block_lambda,
        row_lambda=report.row_lambda,
        calibration=report.calibration,
        config=report.config,
        versions=report.versions,
    )


def apply_changes(decoder: Decoder, changes: Mapping[str, Change]) -> None:
    """Change the weights, in place; offloaded ones whenever they are read from now on."""
    with torch.no_grad():
        for name, projection in decoder.projections.items():
            if is_offloaded(projection.module):
                change_offloaded(projection, changes[name])
            else:
                changes[name].apply_to(projection.weight)


@contextmanager
def deferred_interrupt() -> Iterator[None]:
    """Delay Ctrl-C until the context, in which weights change, ends."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received = []
    before = signal.signal(signal.SIGINT, lambda *_: received.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before or signal.SIG_DFL)
    if received:
        raise KeyboardInterrupt
