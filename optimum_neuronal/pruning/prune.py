"""One prune: the top-up's search, the final pass, the report; and at the very end the weights change."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, replace

import torch

from ..blocks.block_inputs import inference
from ..blocks.runner import BlockRunner
from ..checkpoint.sparsity_config import make_sparsity_config, record_sparsity
from ..common.interrupts import deferred_interrupt
from ..common.machine import with_less_memory
from ..common.notes import get_logger
from ..compat.accelerate import execution_device
from ..config.methods import Methods
from ..model.packed_size import PackedSize
from ..model.projections import Projection
from ..model.weight_names import stored_names
from ..packed.formats.quantized import QuantizedWeight
from ..report import PruningReport
from ..trials import Trials
from ..trials.cache import Cache
from .context import PruneContext, PruneOutcome, default_batch_size
from .final_pass import FinalPruning, apply_changes
from .packing import head_errors, put_quantized, round_head
from .refit import Refit
from .reporting import make_report, pruned_size
from .rotate import rotated


logger = get_logger(__name__)


def prune_model(context: PruneContext, remember: Callable[[PruningReport, PackedSize], None]) -> PruningReport:
    """Prune the model of a context, in place. A failure or an interruption leaves it as it was.

    Args:
        context ([`PruneContext`]): with calibration sequences and records.
        remember: is called with the report and the size of what was pruned as soon as the weights are changed.
    """
    model, decoder = context.model, context.decoder
    names = stored_names(model, decoder)
    with ExitStack() as last, rotated(context) as rotation:
        outcome = find_changes(context)
        head = round_head(model, context.config.embedding_bits)
        report = make_report(context, outcome, head_errors(model, head), rotation)
        quantized = {name: own for name, own in outcome.changes.items() if isinstance(own, QuantizedWeight)}
        size = pruned_size(decoder, report)
        sparsity_config = make_sparsity_config(decoder, report, names)
        last.enter_context(deferred_interrupt())  # raised behind `rotated`, which would take it for a failure
        apply_changes(decoder, outcome.changes)  # nothing that may fail from here on
        if quantized or head:
            put_quantized(model, decoder, quantized, head)
        record_sparsity(model, sparsity_config)
        remember(report, size)
    return report


def find_changes(context: PruneContext) -> PruneOutcome:
    """Find what becomes of every weight; change none.

    Raises:
        `MemoryError`: too little memory, even with half the batch.
    """
    context = replace(context, methods=_suited(context))
    _warn_if_underdetermined(context)
    device, quiet = execution_device(context.model.get_input_embeddings()), context.records.processes.rank > 0

    def find(batch_size: int) -> PruneOutcome:
        runner = BlockRunner(context.decoder, batch_size, device, context.max_hidden_bytes, quiet)
        return _find(context, make_trials(context, runner, context.ids))

    with inference(context.model):
        return with_less_memory(find, context.batch_size or default_batch_size(context.ids.shape[1]))


def make_trials(context: PruneContext, runner: BlockRunner, ids: torch.Tensor) -> Trials:
    """Return the trials of a prune for calibration sequences of shape (sequences, tokens)."""
    config, methods = context.config, context.methods
    return Trials(
        runner,
        methods.saliency,
        ids,
        config.num_alignment_samples,
        methods.pattern,
        config.min_expert_tokens,
        context.records,
        context.cache or Cache(),
    )


def _find(context: PruneContext, trials: Trials) -> PruneOutcome:
    methods, clock, config = context.methods, context.clock, context.config
    if methods.needs_calibration:
        trials.cache.get("replay is right", trials.check_replay)
    allocation = methods.topup.allocate(trials, config.amount)
    clock.lap("allocation")
    refit = Refit(config.refit_epochs, config.refit_learning_rate) if config.refit_epochs else None
    changes, starved = FinalPruning.by(methods, trials, allocation.plan, refit).find()
    clock.lap("pruning")
    return PruneOutcome(allocation, changes, trials.runner.block_forwards, starved)


def _suited(context: PruneContext) -> Methods:
    """Return the methods as they can serve the model. Warn of hyper-parameters that change for it."""
    topup = context.methods.topup
    suited = context.methods.suited_to(context.decoder)
    before, after = asdict(topup), asdict(suited.topup)
    changed = ", ".join(f"{name}={value!r}" for name, value in after.items() if value != before[name])
    if changed:
        model = type(context.model).__name__
        logger.warning(f"{model} has no causal language-model head, so the top-up {topup.name!r} goes by {changed}.")
    return suited


def _warn_if_underdetermined(context: PruneContext) -> None:
    """Warn of fewer tokens than inputs: a least-squares fit then has no single solution, and dampening chooses one."""

    def inputs(projection: Projection) -> int:
        return projection.shape[1]

    tokens = context.ids.numel()
    widest = max((p for p in context.decoder.projections.values() if p.expert is None), key=inputs, default=None)
    if context.methods.saliency.updates_weights and widest is not None and tokens < inputs(widest):
        logger.warning(
            f"There are {tokens} calibration tokens, and {widest.name} has {inputs(widest)} inputs: what its weights are fitted "
            "to is underdetermined, and more is lost than need be. Take more sequences (num_samples)."
        )
