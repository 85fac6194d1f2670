"""Rates of projections under a budget: cases by hand, and the best of all where few can be tried."""

import itertools

import pytest

from optimum_neuronal.topup.rates import choose_rates, extended


def sizes(names: str, size: int = 100) -> dict:
    return {name: {bits: size * bits for bits in (2, 3, 4)} for name in names}


def test_each_bit_takes_a_quarter_where_nothing_was_measured():
    assert extended({2: 16.0}, (2, 3, 4)) == {2: 16.0, 3: 4.0, 4: 1.0}
    assert extended({2: 16.0, 3: 3.0}, (2, 3, 4, 5)) == {2: 16.0, 3: 3.0, 4: 0.75, 5: 0.1875}
    assert extended({3: 3.0}, (2, 3)) == {2: 12.0, 3: 3.0}


def test_the_largest_divergence_is_raised_first():
    curves = {"a": extended({2: 1.0}), "b": extended({2: 10.0}), "c": extended({2: 0.1})}
    assert choose_rates(curves, sizes("abc"), 600) == {"a": 2, "b": 2, "c": 2}
    assert choose_rates(curves, sizes("abc"), 799) == {"a": 2, "b": 3, "c": 2}
    assert choose_rates(curves, sizes("abc"), 800) == {"a": 2, "b": 4, "c": 2}
    assert choose_rates(curves, sizes("abc"), 900) == {"a": 3, "b": 4, "c": 2}
    assert choose_rates(curves, sizes("abc"), 10_000) == {"a": 4, "b": 4, "c": 4}


def test_divergence_is_counted_by_byte():
    curves = {"large": extended({2: 1.5}), "small": extended({2: 1.0})}
    own = {"large": sizes("a", 200)["a"], "small": sizes("a", 100)["a"]}
    assert choose_rates(curves, own, 800) == {"large": 2, "small": 4}


def test_what_still_fits_is_raised_after_what_does_not():
    curves = {"large": extended({2: 100.0}), "small": extended({2: 1.0})}
    own = {"large": sizes("a", 1000)["a"], "small": sizes("a", 100)["a"]}
    assert choose_rates(curves, own, 2400) == {"large": 2, "small": 4}


def test_a_dear_first_bit_does_not_hide_a_cheap_second():
    """At 3 bits nothing is gained, at 4 all: two bits at once."""
    curves = {"a": {2: 1.0, 3: 1.0, 4: 0.0}, "b": {2: 0.3, 3: 0.2, 4: 0.1}}
    assert choose_rates(curves, sizes("ab"), 600) == {"a": 4, "b": 2}


@pytest.mark.parametrize("budget", range(1000, 2001, 100))
def test_near_the_best_of_all_and_within_the_budget(budget):
    curves = {name: extended({2: value, 3: value / 3}) for name, value in zip("abcde", (9.0, 1.0, 4.0, 2.5, 0.3))}
    own = sizes("abcde")
    found = choose_rates(curves, own, budget)
    assert sum(own[name][bits] for name, bits in found.items()) <= budget
    best = min(
        sum(curves[name][bits] for name, bits in zip("abcde", tried))
        for tried in itertools.product((2, 3, 4), repeat=5)
        if 100 * sum(tried) <= budget
    )
    assert sum(curves[name][bits] for name, bits in found.items()) <= 1.0001 * best
