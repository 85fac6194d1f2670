"""One prune: the top-up's plan, the blocks one by one, the report; at the very end the weights change."""

import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from ..blocks.block_inputs import Call, Stream, Streams
from ..blocks.offload import ChangedWeights, change_offloaded
from ..common.inference import inference
from ..common.notes import get_logger
from ..compat.hf_private import is_offloaded, offload_hook
from ..files.records import Finding
from ..model.change import Change, NewWeight, PackedChange
from ..model.projections import Block, Decoder, stored_names, trial_weights
from ..report import PruningReport
from ..saliency import Inputs
from ..saliency.base import check_finite
from ..saliency.plan import Plan
from ..trials import PlanEvaluator
from .prepare import Clock, PruneContext
from .refit import RUNS, Refit, first_zeros
from .reporting import PruneOutcome, make_report, make_sparsity_config, record_sparsity


logger = get_logger(__name__)

PROGRESS = "pruning, block by block"


def prune_model(context: PruneContext) -> PruningReport:
    """Prune the model of a context, in place. A failure or an interruption leaves it as it was."""
    decoder = context.decoder
    names = stored_names(context.model, decoder)
    outcome = find_changes(context)
    report = make_report(context, outcome)
    sparsity_config = make_sparsity_config(decoder, report, names)
    with deferred_interrupt():
        apply_changes(decoder, outcome.changes)  # nothing that may fail from here on
        record_sparsity(context.model, sparsity_config)
    return report


def find_changes(context: PruneContext) -> PruneOutcome:
    """Find the changes of all weights, without making them."""
    config, methods, runner = context.config, context.methods, context.runner
    _warn_if_underdetermined(context)
    evaluator = PlanEvaluator(
        runner=runner,
        saliency=methods.saliency,
        ids=context.ids,
        num_alignment_samples=config.num_alignment_samples,
        pattern=methods.pattern,
        min_expert_tokens=config.min_expert_tokens,
        records=context.records,
        cache=context.cache,
    )
    with inference(context.model):
        if methods.needs_calibration:
            context.cache.once("replay is right", partial(runner.check_replay, context.ids[:1]))
        context.clock.lap("calibration data")
        allocation = methods.topup.allocate(evaluator, config.sparsity)
        context.clock.lap("allocation")
        refit = Refit.of(config) if config.refit_epochs else None
        final = replace(evaluator, norms=allocation.norms)
        scores_dense = methods.topup.scores_dense
        changes, starved = BlockPass(final, allocation.plan, refit, scores_dense, context.clock).find()
        context.clock.lap("pruning")
    return PruneOutcome(allocation, changes, runner.block_forwards, starved)


def _warn_if_underdetermined(context: PruneContext) -> None:
    """Warn if there are fewer tokens than inputs: a least-squares fit then has no unique solution."""
    tokens, projections = context.ids.numel(), context.decoder.projections.values()
    widest = max((p.shape[1] for p in projections if p.expert is None), default=0)
    if context.methods.saliency.updates_weights and tokens < widest:
        logger.warning(
            f"There are only {tokens} calibration tokens for projections with up to {widest} inputs, so the fit of "
            "weights is underdetermined. Use more sequences (num_samples)."
        )


@dataclass(frozen=True)
class BlockPass:
    """Finds the changes of a plan: masks, and new weights if the saliency makes them. No weight is changed.

    Each block receives the outputs of the pruned blocks before it; with `scores_dense`, the dense model's. For a
    refit, the dense model's stream runs beside the sparse one: each block is fitted to its output in the dense model.
    """

    evaluator: PlanEvaluator
    plan: Plan
    refit: Refit | None = None
    scores_dense: bool = False
    clock: Clock = field(default_factory=Clock)

    def find(self) -> tuple[dict[str, PackedChange], list[str]]:
        """Return the changes of weights by projection name, and the names of starved experts' projections."""
        evaluator, changes, starved = self.evaluator, {}, []

        def take(index: int, block: Block, prune: Callable[[], Finding]) -> None:
            value, tensors = evaluator.records.recorded(f"block-{index:05d}", prune)
            starved.extend(value["starved"])
            for p in block.pruned:  # changes of offloaded weights wait in CPU memory
                device = torch.device("cpu") if is_offloaded(p.module) else p.weight.device
                changes[p.name] = PackedChange.of_tensors(tensors, p.name, p.shape).to(device)

        def visit(index: int, block: Block, calls: Sequence[Call], streams: Streams) -> Streams:
            dense = [evaluator.runner.output(block, stream, calls) for stream in streams[1:]]
            if block.pruned:
                take(index, block, partial(self._prune_block, block, calls, *streams[:1], *dense))
            if block is evaluator.decoder.blocks[-1]:
                return streams  # nothing reads the last block's output
            if self.scores_dense:
                return [evaluator.runner.output(block, streams[0], calls)]
            with trial_weights(block.pruned, lambda p: changes[p.name]):
                return [evaluator.runner.output(block, streams[0], calls), *dense]

        if evaluator.saliency.uses_activations:
            evaluator.cache.release()
            batch_size = self.refit and self.refit.batch_size(evaluator.ids.shape[1])
            inputs = evaluator.capture_all(evaluator.statistic, batch_size)
            evaluator.runner.run(inputs, 1 if self.refit is None else 2, visit, PROGRESS, release=True)
        else:
            evaluator.runner.for_each_block(
                lambda index, block: take(index, block, partial(self._solve, block, Inputs(), self.plan)), PROGRESS
            )
        return changes, starved

    def _prune_block(
        self, block: Block, calls: Sequence[Call], hidden: Stream, expected: Stream | None = None
    ) -> Finding:
        """Return the finding of a block, which `hidden` states enter. A refit fits its values to the `expected` output."""
        evaluator, refit = self.evaluator, self.refit
        norms = evaluator.runner.inputs_of(block, hidden, calls, evaluator.statistic)
        inputs = evaluator.inputs(block, evaluator.joined(norms, evaluator.statistic))
        if refit is None:
            return self._solve(block, inputs, self.plan)
        adds = evaluator.pattern is None
        value, tensors = self._solve(block, inputs, first_zeros(self.plan, block.pruned) if adds else self.plan)
        energies = {name: norm.value.sum(dim=0) for name, norm in norms.items()}
        changes = {p.name: PackedChange.of_tensors(tensors, p.name, p.shape) for p in block.pruned}
        evaluator.runner.block_forwards += RUNS * refit.epochs * hidden.sequences
        fitted = refit.fit(block, changes, energies, hidden, expected, calls, self.plan if adds else None)
        for p in block.pruned:
            tensors |= PackedChange.pack(NewWeight(fitted[p.name]), p.weight).tensors(p.name)
        return value, tensors

    def _solve(self, block: Block, inputs: Inputs, plan: Plan) -> Finding:
        """Return the starved experts of a block, and the tensors of its changes."""
        evaluator = self.evaluator
        changes = evaluator.saliency.changes(block.pruned, inputs, plan, evaluator.pattern)
        self.clock.lap("pruning")
        changes = evaluator.saliency.adjusted(changes, block.pruned, inputs)
        self.clock.lap("allocation")
        check_finite({n: torch.isfinite(c.weight).all() for n, c in changes.items() if isinstance(c, NewWeight)})
        tensors: dict[str, torch.Tensor] = {}
        for name, change in changes.items():
            tensors |= PackedChange.pack(change, block.projections[name].weight).tensors(name)
        return {"starved": list(inputs.starved)}, tensors


def apply_changes(decoder: Decoder, changes: Mapping[str, Change]) -> None:
    """Change the weights, in place; offloaded ones whenever they are read from now on."""
    with torch.no_grad():
        for name, projection in decoder.projections.items():
            if is_offloaded(projection.module):
                change_offloaded(projection, changes[name])
            else:
                changes[name].apply_to(projection.weight)


@contextmanager
def changed_weights(decoder: Decoder, changes: Mapping[str, Change]) -> Iterator[None]:
    """Let a model compute with changes while the context lasts, offloaded ones whenever their weights are read."""
    projections = list(decoder.projections.values())
    offloaded = [p for p in projections if is_offloaded(p.module)]
    maps = {hook: hook.weights_map for hook in (offload_hook(p.module) for p in offloaded)}
    try:
        for hook, weights in maps.items():
            hook.weights_map = ChangedWeights(weights)  # its own, since an earlier prune may have left some
        for projection in offloaded:
            change_offloaded(projection, changes[projection.name])
        with trial_weights([p for p in projections if p not in offloaded], lambda p: changes[p.name]):
            yield
    finally:
        for hook, weights in maps.items():
            hook.weights_map = weights


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
