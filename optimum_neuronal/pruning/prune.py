"""One prune: the top-up's plan, the blocks one by one, the report; at the very end the weights change."""

from dataclasses import replace

from ..blocks.block_inputs import inference
from ..common.interrupt import deferred_interrupt
from ..common.notes import get_logger
from ..model.projections import stored_names
from ..report import PruningReport
from ..trials import Trials
from .prepare import PruneContext
from .prune_blocks import BlockPass, apply_changes
from .refit import Refit
from .reporting import PruneOutcome, make_report, make_sparsity_config, record_sparsity


logger = get_logger(__name__)


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
    """Find the changes of all weights, and make none."""
    config, methods, runner = context.config, context.methods, context.runner
    _warn_if_underdetermined(context)
    trials = Trials(
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
            context.cache.get("replay is right", lambda: runner.check_replay(context.ids[:1]))
        allocation = methods.topup.allocate(trials, config.sparsity)
        context.clock.lap("allocation")
        refit = Refit.of(config) if config.refit_epochs else None
        changes, starved = BlockPass(replace(trials, norms=allocation.norms), allocation.plan, refit).find()
        context.clock.lap("pruning")
    return PruneOutcome(allocation, changes, runner.block_forwards, starved)


def _warn_if_underdetermined(context: PruneContext) -> None:
    """Warn if there are fewer tokens than inputs: a least-squares fit then has no unique solution."""
    tokens, projections = context.ids.numel(), context.decoder.projections.values()
    widest = max((p.shape[1] for p in projections if p.expert is None), default=0)
    if context.methods.saliency.updates_weights and tokens < widest:
        logger.warning(
            f"There are only {tokens} calibration tokens for projections of up to {widest} inputs, so the fit of weights is "
            "underdetermined. Use more sequences (num_samples)."
        )
