"""Which sparsity and bits of values a budget of bits a weight is best spent on."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ..engine.passes import Pass
from ..methods import Methods
from ..model.projections import Decoder
from ..sparsity.plan import SparsityPlan
from ..topup import Allocation, TopUp
from ..topup.choosing import index_of_smallest
from ..trials.engine import Engine
from ..trials.levels import LevelsPass
from ..trials.output_errors import OutputPass, output_errors
from ..trials.sweep import Sweep
from .bit_budget import Pair


SOLVING, LABEL = "Weights of few bits", "Bits"
NEAR = 2.0  # times the least error with uniform sparsity: a search may change the order of what is nearer
SEARCHED = 2  # of them, the best, at most


class Choice(NamedTuple):
    """What a budget is spent on.

    Args:
        pair ([`Pair`]): the best.
        told (`list[dict]`):
            Of every pair the error with `uniform` sparsity, in nats per predicted token, and of those near to the best the
            `error` with the top-up's plan.
        allocation ([`Allocation`], *optional*): the top-up's for the pair, if it was looked at.
    """

    pair: Pair
    told: list[dict[str, Any]]
    allocation: Allocation | None


def searches(pairs: Sequence[Pair], methods: Methods) -> int:
    """How often the top-up decides, if one of these pairs is chosen: once, or at most this often."""
    return min(SEARCHED, max(1, len(pairs))) if methods.topup.uses_levels(methods.saliency) else 1


def choosing_passes(pairs: Sequence[Pair], methods: Methods) -> list[Pass]:
    """What [`choose_pair`] costs, with the top-up's own passes."""
    asked, times = list(methods.topup.passes_with(methods.saliency)), searches(pairs, methods)
    if len(pairs) < 2:
        return asked
    chosen = [LevelsPass(SOLVING, 0), OutputPass(LABEL, len(pairs), by_score=True)]
    return chosen + (times * [*asked, OutputPass(LABEL, 1, by_score=True)] if times > 1 else asked)


def check_choice(decoder: Decoder) -> None:
    """Raises `ValueError` if there is nothing that pairs can be compared by."""
    if not decoder.predicts_next_token:
        raise ValueError(
            f"{type(decoder.model).__name__} has no causal language-model head, so that bits alone cannot be divided by what "
            "is lost: give value_bits too, or sparsity."
        )


def choose_pair(engine: Engine, pairs: Sequence[Pair], topup: TopUp) -> Choice:
    """The pair whose model is nearest to the dense one, by its next-token distributions.

    First with uniform sparsity, on weights that are solved on the dense model's inputs. What sparsity costs depends on
    where it goes, so that of pairs which are near to the best one the top-up's own plans are compared, if its candidates have
    rounded weights.

    Args:
        engine ([`Engine`]): of a saliency, and of no rounding yet; has the rounding of the chosen pair afterwards.
        pairs (`Sequence[Pair]`): of ascending sparsity, as [`pairs_within`] has them.
        topup ([`TopUp`]): where the sparsity will go.
    """
    applier = engine.applier
    errors = _uniform_errors(engine, pairs)
    told = {pair: {**pair._asdict(), "uniform": error} for pair, error in zip(pairs, errors)}
    ranked = sorted(pairs, key=lambda pair: told[pair]["uniform"])
    near = [pair for pair in ranked[:SEARCHED] if told[pair]["uniform"] <= NEAR * min(errors)]
    found: dict[Pair, Allocation] = {}
    if len(near) > 1 and topup.uses_levels(engine.saliency):
        for pair in near:
            engine.applier = replace(applier, value_bits=pair.value_bits)
            found[pair] = topup.allocate(Sweep(engine), pair.sparsity)
            (told[pair]["error"],) = output_errors(engine, [found[pair].plan], "kl", LABEL)
        errors = [told[pair].get("error", math.inf) for pair in pairs]
    best = pairs[index_of_smallest(errors)]
    engine.applier, engine.levels = replace(applier, value_bits=best.value_bits), None
    return Choice(best, list(told.values()), found.get(best))


def _uniform_errors(engine: Engine, pairs: Sequence[Pair]) -> list[float]:
    engine.solve(
        {pair.sparsity: replace(engine.applier, value_bits=pair.value_bits) for pair in pairs}, "bits", SOLVING
    )
    names = engine.decoder.projections
    plans = [SparsityPlan(dict.fromkeys(names, pair.sparsity)) for pair in pairs]
    return output_errors(engine, plans, "kl", LABEL)
