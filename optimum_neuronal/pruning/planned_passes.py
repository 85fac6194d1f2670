"""What a prune will do, pass by pass: a dry run tells it, and a prune shows how far it has come."""

from collections.abc import Iterator, Sequence

from ..config import NeuronALConfig
from ..engine.paired_inputs import STAGES
from ..engine.passes import Pass
from ..engine.progress import Stage
from ..engine.runner import CheckPass
from ..methods import Methods
from ..model.projections import Decoder
from ..trials.engine import DensePass
from ..trials.levels import LABEL as LEVELS
from .bit_budget import SOLVING, Pair, choosing_passes, likely
from .cost import plan_sweeps
from .final_pass import DenseTargetsPass, PruningPass, needs_inputs
from .refit import RefitPass, all_epochs
from .solving_cost import solving_cost


PRUNING, REFIT = "Pruning", "Refit"


def planned_passes(methods: Methods, config: NeuronALConfig, pairs: Sequence[Pair] = ()) -> list[Pass]:
    """Everything that runs blocks, in order; nothing if no activations are looked at.

    Args:
        methods ([`Methods`]), config ([`NeuronALConfig`]): of each other.
        pairs (`Sequence[Pair]`): of sparsity and bits of values, if one of them is to be chosen.
    """
    if not methods.needs_calibration:
        return []
    final = []
    if needs_inputs(methods.saliency, methods.topup.statistic):
        final.append((DenseTargetsPass if methods.needs_dense_stream else PruningPass)(PRUNING, 1))
    if config.refit_epochs:
        final.append(RefitPass(REFIT, 0, **_refitting(config)))
    return list(all_passes(choosing_passes(pairs, methods), final))


def _refitting(config: NeuronALConfig) -> dict[str, int]:
    """How often a [`RefitPass`] runs the blocks."""
    if config.value_bits is None and config.bits_per_weight is None:
        return {"epochs": config.refit_epochs}
    return {"epochs": all_epochs(config.refit_epochs), "looks": STAGES}


def all_passes(asked: Sequence[Pass], final: Sequence[Pass]) -> Iterator[Pass]:
    """What a prune does from its check to the final masks: what its top-up asks, and what that needs.

    Args:
        asked (`Sequence[Pass]`): by the top-up.
        final (`Sequence[Pass]`): of the final pruning; none if it looks at no activations.
    """
    yield CheckPass("Check", 0)
    dense_is_known = False
    for step in asked:
        if step.needs_dense and not dense_is_known:
            dense_is_known = True
            yield DensePass("Dense activations", 0)
        yield step
    yield from final


def planned_stages(
    methods: Methods, config: NeuronALConfig, decoder: Decoder, tokens: int, pairs: Sequence[Pair] = ()
) -> dict[str, Stage]:
    """Label of passes -> how many there will be, and their share of the work in floating-point operations.

    Args:
        methods ([`Methods`]), config ([`NeuronALConfig`]): of each other.
        decoder ([`Decoder`]): whose blocks are run.
        tokens (`int`): of a calibration sequence.
        pairs (`Sequence[Pair]`): of sparsity and bits of values, if one of them is to be chosen.
    """
    passes, config = planned_passes(methods, config, pairs), likely(config, pairs)
    if not passes:
        return {}
    sweeps = plan_sweeps(passes, decoder, tokens, config.num_samples, config.num_alignment_samples)
    solving = solving_cost(decoder, config, methods, tokens, pairs)
    chosen, times = len(pairs) if len(pairs) > 1 else 0, max(1, solving.sparsities)
    solved_by = {SOLVING: chosen, LEVELS: solving.sparsities - chosen - 1, PRUNING: 1}
    shares = {label: count / times for label, count in solved_by.items()}
    stages: dict[str, Stage] = {}
    for step, sweep in zip(passes, sweeps):
        # Blocks are refitted while they are visited for the final pruning.
        label, times = (PRUNING, 0) if step.label == REFIT else (step.label, step.times)
        before = stages.get(label, Stage(0, 0))
        solved = solving.operations * shares.get(step.label, 0)
        stages[label] = Stage(before.passes + times, before.work + sweep.operations + solved)
    return stages
