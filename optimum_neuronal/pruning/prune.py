"""One prune: the top-up's search, the final pass, the report; and at the very end the weights change."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace

from ..checkpoint.sparsity_config import make_sparsity_config, record_sparsity
from ..compat.accelerate import execution_device
from ..config import NeuronALConfig
from ..engine.capture import inference
from ..engine.progress import Progress
from ..engine.runner import BlockRunner
from ..methods import Methods
from ..model.projections import Projection
from ..model.weight_names import stored_names
from ..report import PruningReport
from ..system.machine import with_less_memory
from ..system.notes import get_logger
from ..topup import Allocation
from ..trials.applier import PlanApplier
from ..trials.engine import Cache, Engine
from ..trials.sweep import Sweep
from .bit_budget import choose_pair
from .context import PruneContext, PruneOutcome
from .final_pass import FinalPruning, apply_changes
from .planned_passes import planned_stages
from .quantising import apply_to_head, round_changes, round_head
from .refit import Refit
from .reporting import make_report


logger = get_logger(__name__)

TOKENS_PER_FORWARD = 2048  # enough to keep a processor busy, and no more memory than one of the paper's sequences


def default_batch_size(tokens: int) -> int:
    """Return how many sequences of so many tokens go through a forward if the user gave no number: at least 1."""
    return max(1, TOKENS_PER_FORWARD // max(1, tokens))


def prune_model(context: PruneContext, remember: Callable[[PruningReport], None]) -> PruningReport:
    """Prune the model of a context, in place. A failure or an interruption leaves it as it was.

    Args:
        context ([`PruneContext`]): with calibration sequences and records.
        remember: is called with the report as soon as the weights are changed.
    """
    model, decoder = context.model, context.decoder
    names, outcome = stored_names(model, decoder), find_changes(context)
    head, head_roundings = round_head(model, context.config.embedding_bits)
    report = make_report(context, outcome, head_roundings)
    sparsity_config = make_sparsity_config(decoder, report, names)
    with deferred_interrupt():  # nothing that may fail from here on
        apply_changes(decoder, outcome.changes)
        apply_to_head(model, head)
        record_sparsity(model, sparsity_config)
        remember(report)
    return report


@contextmanager
def deferred_interrupt() -> Iterator[None]:
    """Hold Ctrl-C back while the context lasts, in which weights change, and raise it afterwards."""
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


def find_changes(context: PruneContext) -> PruneOutcome:
    """Find what becomes of every weight; change none.

    Raises:
        `MemoryError`: too little memory, even with half the batch.
    """
    context = replace(context, methods=_suited(context))
    _warn_if_underdetermined(context)
    tokens = context.ids.shape[1]

    def find(batch_size: int) -> PruneOutcome:
        stages = planned_stages(context.methods, context.config, context.decoder, tokens, context.pairs)
        with Progress(stages, quiet=context.records.processes.rank > 0) as progress:
            return _find(context, _make_engine(context, batch_size, progress))

    with inference(context.model):
        return with_less_memory(find, context.batch_size or default_batch_size(tokens))


def _make_engine(context: PruneContext, batch_size: int, progress: Progress) -> Engine:
    config, methods = context.config, context.methods
    device = execution_device(context.model.get_input_embeddings())
    return Engine(
        BlockRunner(context.decoder, batch_size, device, context.max_hidden_bytes, progress),
        PlanApplier(methods.saliency, methods.pattern, config.min_expert_tokens, config.value_bits),
        context.ids,
        config.num_alignment_samples,
        context.records,
        Cache() if context.cache is None else context.cache,
    )


def _find(context: PruneContext, engine: Engine) -> PruneOutcome:
    methods, topup, clock = context.methods, context.methods.topup, context.clock
    if methods.needs_calibration:
        engine.cache.get("replay is right", engine.check_replay)
    config, allocation = _allocate(context, engine)
    engine = engine.with_value_bits(config.value_bits)
    clock.lap("allocation")
    refine = topup.refine if topup.refines else None
    refit = Refit(config.refit_epochs, config.refit_learning_rate) if config.refit_epochs else None
    final = FinalPruning(engine, allocation.plan, refine, topup.statistic, refit, methods.needs_dense_stream)
    (changes, starved), roundings = final.find(), {}
    clock.lap("pruning")
    if config.value_bits is not None and not methods.saliency.updates_weights:  # updated ones are quantised together
        changes, roundings = round_changes(engine.decoder, changes, config.value_bits)
        clock.lap("rounding")
    return PruneOutcome(config, allocation, changes, engine.runner.block_forwards, starved, roundings)


def _allocate(context: PruneContext, engine: Engine) -> tuple[NeuronALConfig, Allocation]:
    """Return where the sparsity goes, and the config with the chosen pair in place of a budget of bits."""
    config, topup = context.config, context.methods.topup
    if not context.pairs:
        return config, replace(topup.allocate(Sweep(engine), config.sparsity), levels=None)
    pair, allocation, compared = choose_pair(engine, context.pairs, topup)
    decisions = {"bits": {"budget": config.bits_per_weight, "pairs": compared}, **allocation.decisions}
    return pair.of(config), replace(allocation, decisions=decisions, levels=None)


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
