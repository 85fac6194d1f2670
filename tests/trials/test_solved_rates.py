"""Weights quantized before trials: what a plan makes of them, and what they cost."""

import pytest
import torch
from conftest import make_ids, make_model
from trial_helpers import build_trials, state, unchanged

from optimum_neuronal.blocks.block_inputs import inference
from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.packed.formats.quantized import QuantizedWeight
from optimum_neuronal.saliency.low_bit import LowBit
from optimum_neuronal.saliency.plan import DENSE, RatePlan
from optimum_neuronal.trials.solved import SolvedRates


def solved_trials(family="llama", bits=(2, 4), ids=None, batch_size=4, **options):
    model = make_model(family)
    ids = make_ids() if ids is None else ids
    trials = build_trials(find_decoder(model), LowBit(), ids, 4, batch_size, **options)
    with inference(model):
        return trials, trials.solve(SolvedRates(bits))


def codes(trials, solved, bits):
    """The quantized weights of all projections, by name."""
    found = {}
    for index, block in enumerate(trials.decoder.blocks):
        (change_of,) = solved.changes(index, [RatePlan(dict.fromkeys(trials.decoder.projections, bits))])
        found |= {p.name: change_of(p) for p in block.pruned}
    return found


@pytest.fixture(scope="module")
def known():
    return solved_trials()


def test_a_plan_takes_what_was_solved_and_leaves_the_others_dense(known):
    trials, solved = known
    first, second = trials.decoder.blocks[0].pruned[:2]
    (change_of,) = solved.changes(0, [RatePlan({first.name: 2, second.name: DENSE})])
    change = change_of(first)
    assert isinstance(change, QuantizedWeight) and change.bits == 2 and change.shape == first.shape
    assert torch.equal(change_of(second).applied(second.weight), second.weight)
    (change_of,) = solved.changes(0, [RatePlan({first.name: 4})])
    lost = [(own.applied(first.weight) - first.weight).square().sum() for own in (change, change_of(first))]
    assert change_of(first).bits == 4 and 0 < lost[1] < lost[0] / 4


def test_trials_lose_more_with_fewer_bits(known):
    trials, solved = known
    before, names = state(trials.decoder.model), list(trials.decoder.projections)
    plans = [RatePlan(dict.fromkeys(names, bits)) for bits in (DENSE, 4, 2)]
    with inference(trials.decoder.model):
        errors = trials.output_errors(plans, "kl", None, solved)
    assert errors[0] == pytest.approx(0, abs=1e-6) and 1e-6 < errors[1] < errors[2] / 4
    assert unchanged(trials.decoder.model, before)
