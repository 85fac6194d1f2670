"""The learning of a rotation, measured on a sample of the blocks for a dry run."""

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ..rotation.learning import Rotation
from ..rotation.objective import LOOK_EVERY, Term
from ..rotation.rotated_weights import RotatedWeights, find_rotated
from ..rotation.sensitivity import LABEL, fisher_weights


if TYPE_CHECKING:
    from .rehearsal import Rehearsal


def rehearse_rotation(rehearsal: "Rehearsal", rotation: Rotation) -> None:
    """Note the learning of a rotation: gradients, Hessians, and a few of its steps, which stand for all.

    Args:
        rehearsal ([`Rehearsal`]): of the prune.
        rotation ([`Rotation`]): of the prune.
    """
    runner, ids = rehearsal.engine.runner, rehearsal.engine.ids
    parts, terms = find_rotated(runner.decoder, rotation.untie), []
    if rotation.weights == "fisher":
        few = ids[: rotation.fisher_samples]
        share = min(rotation.fisher_samples, round(rehearsal.all_sequences * len(ids))) / len(few)
        rehearsal.ask(("fisher",), LABEL, lambda _: fisher_weights(runner, few, 0), sequences=share)
    fisher = dict.fromkeys(runner.decoder.projections, 1.0)

    def find(_) -> list[torch.Tensor]:
        terms[:] = rotation.find_terms(parts, runner, ids, fisher)
        return _inverses(terms)

    def descend(_) -> None:
        with torch.enable_grad():
            replace(rotation, steps=LOOK_EVERY).descend(parts, terms, runner, 0)

    rehearsal.ask(("inputs",), LABEL, find, sequences=rehearsal.all_sequences)
    rehearsal.ask(("descent",), LABEL, descend, sequences=1, times=math.ceil(rotation.steps / LOOK_EVERY))


def drawn_bytes(parts: RotatedWeights, rotation: Rotation) -> dict[str, int]:
    """Return the bytes of the rows that the learning draws, as [`PrunePlan`] has them. No weight is read."""
    share, total = rotation.share_of_rows(parts.decoder.config.hidden_size), 0.0
    for own in parts.blocks:
        for projection in own.pruned:
            whole = projection in (own.heads.writer, own.heads.reader)
            total += (1.0 if whole else share) * projection.numel * projection.owner.element_size()
    return {"drawn_bytes": round(total), "copied_bytes": round(total) if share < 1 else 0}


def _inverses(terms: list[list[Term]]) -> list[torch.Tensor]:
    """Return the inverse Hessians of all terms, each once: what the learning keeps in memory."""
    return list({id(term.inverse): term.inverse for own in terms for term in own}.values())
