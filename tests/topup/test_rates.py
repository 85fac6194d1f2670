"""Rates under a budget of bytes: by hand, on models, and the best of all where few can be tried."""

import itertools

import pytest
from conftest import make_ids, make_model
from trial_helpers import build_trials

from optimum_neuronal.blocks.block_inputs import inference
from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.packed.formats.quantized import quantized_bytes
from optimum_neuronal.saliency.low_bit import LowBit
from optimum_neuronal.topup.rates import Rates, choose_rates


WIDE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}  # 0.25 bits of scales at most


def bytes_of(decoder, plan):
    """Of all projections, with one weight for each parameter."""
    owners = {}
    for name, projection in decoder.projections.items():
        owners.setdefault(projection.owner, []).append((projection.shape, plan.amounts[name]))
    assert all(len({bits for _, bits in own}) == 1 for own in owners.values()), "one rate for a parameter"
    return sum(quantized_bytes((len(own), *own[0][0]), own[0][1]) for own in owners.values())


@pytest.mark.parametrize("budget", [2.3, 3.0, 3.5, 8.9])
def test_even_rates_differ_by_one_bit_at_most_and_fill_the_budget(budget):
    decoder = find_decoder(make_model("llama", **WIDE))
    plan = Rates(budget, "uniform").even(decoder)
    weights = sum(p.numel for p in decoder.projections.values())
    assert (
        plan.amounts.keys() == decoder.projections.keys()
        and max(plan.amounts.values()) - min(plan.amounts.values()) <= 1
    )
    spent = 8 * bytes_of(decoder, plan) / weights
    assert spent <= budget and (budget - spent < 64 * 128 / weights or set(plan.amounts.values()) == {8})


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "gpt2"])
def test_experts_of_a_layer_share_a_rate(family):
    decoder = find_decoder(make_model(family))
    weights = sum(p.numel for p in decoder.projections.values())
    plan = Rates(6, "uniform").even(decoder)
    assert 5 < 8 * bytes_of(decoder, plan) / weights <= 6 and len(set(plan.amounts.values())) == 2


def test_more_bits_where_the_model_loses_more(monkeypatch):
    model = make_model("llama", **WIDE)
    trials, rates = build_trials(find_decoder(model), LowBit(), make_ids(), 2), Rates(3.0)
    asked = []
    original = type(trials).output_errors

    def output_errors(self, plans, metric, label, reference):
        asked.append((len(plans), metric, {bits for plan in plans for bits in plan.amounts.values()}))
        return original(self, plans, metric, label, reference)

    monkeypatch.setattr(type(trials), "output_errors", output_errors)
    with inference(model):
        found = rates.allocate(trials, rates.budget)
    assert asked == [(7, "kl", {0, 2})] * 2, "a block's projections together, each alone at the fewest bits"
    rates_made = found.decisions["rates"]
    assert (
        rates_made["by"] == "divergence"
        and rates_made["bits"] == 2
        and rates_made["divergences"].keys() == found.plan.amounts.keys()
    )
    same_size = [name for name in found.plan.amounts if name.endswith(("gate_proj", "up_proj", "down_proj"))]
    ranked = sorted(same_size, key=rates_made["divergences"].__getitem__)
    assert [found.plan.amounts[name] for name in ranked] == sorted(found.plan.amounts[name] for name in ranked)
    assert 8 * bytes_of(trials.decoder, found.plan) <= 3.0 * sum(p.numel for p in trials.decoder.projections.values())
    assert len(set(found.plan.amounts.values())) > 1


def test_a_budget_below_the_fewest_bits_raises():
    decoder = find_decoder(make_model("llama", **WIDE))
    with pytest.raises(ValueError, match=r"is 2.01, but codes of 2 bits and their scales take 2\.\d+ bits"):
        Rates(2.01).suited_to(decoder)
    Rates(2.3).suited_to(decoder)


def sizes(names: str, size: int = 100) -> dict:
    return {name: {bits: size * bits for bits in (2, 3, 4)} for name in names}


@pytest.mark.parametrize("budget, bits", [(600, "222"), (799, "232"), (800, "242"), (900, "342"), (10_000, "444")])
def test_the_largest_divergence_is_raised_first(budget, bits):
    assert choose_rates({"a": 1.0, "b": 10.0, "c": 0.1}, sizes("abc"), budget) == dict(zip("abc", map(int, bits)))


@pytest.mark.parametrize("large, factor, budget", [(1.5, 2, 800), (100.0, 10, 2400)])
def test_divergence_counts_by_byte_and_only_what_fits_is_raised(large, factor, budget):
    own = {"large": sizes("a", 100 * factor)["a"], "small": sizes("a")["a"]}
    assert choose_rates({"large": large, "small": 1.0}, own, budget) == {"large": 2, "small": 4}


@pytest.mark.parametrize("budget", range(1000, 2001, 200))
def test_near_the_best_of_all_and_within_the_budget(budget):
    divergences, own = dict(zip("abcde", (9.0, 1.0, 4.0, 2.5, 0.3))), sizes("abcde")
    curves = {name: {bits: value / 4 ** (bits - 2) for bits in (2, 3, 4)} for name, value in divergences.items()}
    found = choose_rates(divergences, own, budget)
    assert sum(own[name][bits] for name, bits in found.items()) <= budget
    best = min(
        sum(curves[name][bits] for name, bits in zip("abcde", tried))
        for tried in itertools.product((2, 3, 4), repeat=5)
        if 100 * sum(tried) <= budget
    )
    assert sum(curves[name][bits] for name, bits in found.items()) <= 1.0001 * best
