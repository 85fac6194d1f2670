"""Rotates a model before it is pruned, checks that it computes the same, and restores it if anything fails."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..blocks.block_inputs import inference
from ..blocks.runner import BlockRunner
from ..common.machine import deferred_interrupt
from ..common.notes import get_logger
from ..files.records import Finding
from ..rotation.merging import Originals, Rotations
from ..rotation.rotated_weights import RotatedWeights, find_rotated
from .context import PruneContext


logger = get_logger(__name__)

# Largest accepted change of a token's negative log-likelihood, in nats, root mean square: twenty times the rounding error
# of trained models. Rotations that are merged wrongly change it by more than 1.
TOLERANCE, TOLERANCE_OF_16_BITS = 1e-3, 0.2


@contextmanager
def rotated(context: PruneContext, always_undo: bool = False) -> Iterator[dict[str, Any]]:
    """Rotate the model of a context. Restore all weights on an error, or if `always_undo`.

    Yield for the report: `objective` before and after, `stream` and `unties_head` (True if the stream was rotated and
    the head untied), and `nats_changed`, the change of a token's negative log-likelihood.
    """
    rotation = context.methods.rotation
    assert rotation is not None
    weights = find_rotated(context.decoder, rotation.untie)
    originals = Originals(weights)
    done = False
    try:
        with inference(context.model):
            runner = context.runner(1, quiet=True)
            before, records = _token_losses(context, runner), context.records

            def learn() -> Finding:  # all processes get the first one's
                return records.processes.from_first(records.recorded("rotation", lambda: _learn(context, weights)))

            unties = weights.unties
            originals.merge(Rotations.identity(weights))
            value, tensors = context.cache.get(("rotation", rotation, context.config.seed), learn)
            originals.merge(Rotations.of_tensors(tensors))
            difference = float((_token_losses(context, runner) - before).square().mean().sqrt())
        weight = next(iter(context.decoder.projections.values())).weight
        allowed = TOLERANCE_OF_16_BITS if weight.element_size() == 2 else TOLERANCE
        if not difference <= allowed:  # also for NaN
            raise RuntimeError(
                f"The rotated model computes something else: tokens' negative log-likelihoods changed by {difference:.3g} nats, "
                f"expected at most {allowed:g}. All weights were restored: set rotate=False, and report this model."
            )
        context.clock.lap("rotation")
        yield {**value, "stream": weights.rotates_stream, "unties_head": unties, "nats_changed": difference}
        done = not always_undo
    finally:
        if not done:
            with deferred_interrupt():  # a second Ctrl-C would leave the model half rotated
                originals.restore()


def _learn(context: PruneContext, weights: RotatedWeights) -> Finding:
    runner = context.runner()
    runner.check_replay(context.ids[:1])
    found, losses = context.methods.rotation.learn(weights, runner, context.ids, context.config.seed)
    logger.info(f"Rotation: the objective went from {losses[0]:.4g} to {losses[-1]:.4g}.")
    return {"objective": [losses[0], losses[-1]]}, found.tensors()


def _token_losses(context: PruneContext, runner: BlockRunner) -> torch.Tensor:
    """Return the negative log-likelihood of each token of the alignment sequences but the first."""
    ids, losses = context.ids[: context.config.num_alignment_samples], []
    (last,) = runner.run(runner.capture(ids), 1, runner.pass_on, release=True)
    for own, hidden in zip(ids.split(1), last):
        logits = runner.logits(own, hidden)[0, :-1]
        losses.append(torch.nn.functional.cross_entropy(logits, own[0, 1:].to(logits.device), reduction="none").cpu())
    return torch.cat(losses)
