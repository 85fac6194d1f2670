"""What becomes of every weight: the top-up's search, then the final pruning.

Nothing here changes a weight, so the same model can be asked again: by [`NeuronALPruner`], which applies what was found,
and by [`compare`], which tries it out.
"""

from dataclasses import asdict, dataclass, field, replace
from functools import partial

import torch
from transformers import PreTrainedModel

from ..compat.accelerate import execution_device
from ..config import NeuronALConfig
from ..engine.capture import inference
from ..engine.progress import Progress
from ..engine.runner import BlockRunner
from ..files.journal import Journal
from ..methods import Methods
from ..model.projections import Decoder, Projection
from ..sparsity.masks import Change
from ..system.clock import Clock
from ..system.memory import with_less_memory
from ..system.notes import get_logger
from ..system.processes import Processes
from ..topup import Allocation, TopUp
from ..trials.applier import PlanApplier
from ..trials.engine import Engine
from ..trials.records import Kept, StepRecords
from ..trials.sweep import Sweep
from .bit_budget import choose_pair, pairs_within, settled
from .final_pass import DenseTargets, FinalPruning
from .planned_passes import planned_stages
from .quantising import Rounding, round_changes
from .refit import Refit


logger = get_logger(__name__)

TOKENS_PER_FORWARD = 2048  # enough to keep a processor busy, and no more memory than one of the paper's sequences


def default_batch_size(tokens: int) -> int:
    """Sequences of so many tokens per forward where nobody has asked for a number: at least 1."""
    return max(1, TOKENS_PER_FORWARD // max(1, tokens))


@dataclass(frozen=True)
class PruneOutcome:
    """What a prune found.

    Args:
        config ([`NeuronALConfig`]): how it pruned: as was asked for, with what was chosen in place of a budget of bits.
        allocation ([`Allocation`]): what the top-up decided, and how a budget of bits was divided.
        changes (`dict[str, Change]`): projection name -> what becomes of its weight.
        block_forwards (`int`): how often a block was run on one sequence.
        starved_experts (`list[str]`): the experts' projections that fell back.
        roundings (`dict[str, Rounding]`): projection name -> what rounding its values to few bits did, if they
            were rounded and nothing else.
    """

    config: NeuronALConfig
    allocation: Allocation
    changes: dict[str, Change]
    block_forwards: int
    starved_experts: list[str]
    roundings: dict[str, Rounding] = field(default_factory=dict)


@dataclass
class Shared:
    """What prunes of the same model with the same calibration sequences have in common, so that it is done once.

    Args:
        kept ([`Kept`]): inputs of the blocks, activations and scores of the dense model.
        checked (`bool`): whether replaying the blocks was seen to be right.
    """

    kept: Kept = field(default_factory=partial(Kept, lasting=True))
    checked: bool = False


def find_changes(
    model: PreTrainedModel,
    decoder: Decoder,
    config: NeuronALConfig,
    methods: Methods,
    ids: torch.Tensor,
    clock: Clock,
    journal: Journal | None = None,
    shared: Shared | None = None,
) -> PruneOutcome:
    """What becomes of every weight; none is changed.

    Args:
        model (`PreTrainedModel`), decoder ([`Decoder`]): from [`check`].
        config ([`NeuronALConfig`]): how to prune.
        methods ([`Methods`]): of the config.
        ids (`Tensor` of int64, shape (num_samples, seq_length)): calibration sequences; empty if none are needed.
        clock ([`Clock`]): is told when allocation and pruning end.
        journal ([`Journal`], *optional*): where finished steps and blocks are recorded, and looked up.
        shared ([`Shared`], *optional*): what earlier prunes have found already.

    Raises:
        `MemoryError`: too little memory, even with half the batch.
    """
    methods, config = _suited(methods, decoder), settled(config, decoder)
    _warn_if_underdetermined(decoder, methods, ids)
    check_first = methods.needs_calibration and not (shared and shared.checked)

    def find(batch_size: int) -> PruneOutcome:
        stages = planned_stages(methods, config, decoder, ids.shape[1])
        with Progress(stages, quiet=Processes.current().rank > 0) as progress:
            engine = _engine(model, decoder, config, methods, ids, batch_size, journal, shared, progress)
            if check_first:
                engine.check_replay()
            return _find(engine, config, methods, clock)

    with inference(model):
        batch_size = config.batch_size or default_batch_size(ids.shape[1])
        found = with_less_memory(find, batch_size)
    if shared is not None:
        shared.checked |= check_first
    return found


def _find(engine: Engine, config: NeuronALConfig, methods: Methods, clock: Clock) -> PruneOutcome:
    topup = methods.topup
    config, allocation = _allocate(engine, config, topup)
    clock.lap("allocation")
    refine = topup.refine if topup.refines else None
    refit = Refit(config.refit_epochs, config.refit_learning_rate) if config.refit_epochs else None
    final = DenseTargets if methods.needs_dense_stream else FinalPruning
    pruning = final(engine, allocation.plan, refine, topup.statistic, refit)
    changes, roundings = pruning.find(), {}
    clock.lap("pruning")
    updated = methods.saliency.updates_weights  # such values make up for each other's rounding
    if config.value_bits is not None and not updated:
        changes, roundings = round_changes(engine.decoder, changes, config.value_bits)
        clock.lap("rounding")
    starved = pruning.starved_experts
    return PruneOutcome(config, allocation, changes, engine.runner.block_forwards, starved, roundings)


def _allocate(engine: Engine, config: NeuronALConfig, topup: TopUp) -> tuple[NeuronALConfig, Allocation]:
    """Where the sparsity goes, and the config with what a budget of bits is spent on, by which the engine then goes."""
    if config.bits_per_weight is None:
        return config, topup.allocate(Sweep(engine), config.sparsity)
    choice = choose_pair(engine, pairs_within(engine.decoder, config), topup)
    allocation = choice.allocation or topup.allocate(Sweep(engine), choice.pair.sparsity)
    divided = {"bits": {"budget": config.bits_per_weight, "pairs": choice.told}}
    return choice.pair.of(config), replace(allocation, decisions={**divided, **allocation.decisions})


def _suited(methods: Methods, decoder: Decoder) -> Methods:
    """The methods as they can serve the model; what has to be otherwise than asked for is told."""
    suited = methods.suited_to(decoder)
    asked, taken = asdict(methods.topup), asdict(suited.topup)
    changed = ", ".join(f"{name}={value!r}" for name, value in taken.items() if value != asked[name])
    if changed:
        model, name = type(decoder.model).__name__, methods.topup.name
        logger.warning(f"{model} has no causal language-model head, so the top-up {name!r} goes by {changed}.")
    return suited


def _warn_if_underdetermined(decoder: Decoder, methods: Methods, ids: torch.Tensor) -> None:
    """A least-squares fit with fewer tokens than inputs has no single solution; dampening then chooses one."""
    widest = max((p for p in decoder.projections.values() if p.expert is None), key=_inputs, default=None)
    if methods.saliency.updates_weights and widest is not None and ids.numel() < _inputs(widest):
        logger.warning(
            f"There are {ids.numel()} calibration tokens, and {widest.name} has {_inputs(widest)} inputs: what its weights "
            "are fitted to is underdetermined, and more is lost than need be. Take more sequences (num_samples)."
        )


def _inputs(projection: Projection) -> int:
    return projection.shape[1]


def _engine(
    model: PreTrainedModel,
    decoder: Decoder,
    config: NeuronALConfig,
    methods: Methods,
    ids: torch.Tensor,
    batch_size: int,
    journal: Journal | None,
    shared: Shared | None,
    progress: Progress,
) -> Engine:
    device = execution_device(model.get_input_embeddings())
    return Engine(
        BlockRunner(decoder, batch_size, device, config.max_hidden_bytes, progress),
        PlanApplier(methods.saliency, methods.pattern, config.min_expert_tokens, config.value_bits),
        ids,
        config.num_alignment_samples,
        StepRecords(journal, Processes.current()),
        None if shared is None else shared.kept,
    )
