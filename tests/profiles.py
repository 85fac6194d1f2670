"""How much is tried: of cases a few in every run, many in a night, and what repeats another test on more figures then.

TESTS_PROFILE=night make test
"""

import os
from collections.abc import Iterable

import pytest
from hypothesis import HealthCheck, settings


NIGHT = os.environ.get("TESTS_PROFILE") == "night"
TIMES = 50
BATCH_SIZES = (1, 5, 12) if NIGHT else (1, 5)  # of 12 sequences

at_night = pytest.mark.skipif(not NIGHT, reason="for the night: TESTS_PROFILE=night")


def examples(count: int) -> settings:
    """Settings of a test of so many cases: the same in every run, or at night fifty times as many, others each time."""
    return settings(
        max_examples=count * TIMES if NIGHT else count,
        deadline=None,
        derandomize=not NIGHT,
        database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


def by_day(values: Iterable, *chosen) -> list:
    """Return the values of a parameter that are tried: at night all of them, by day the chosen ones."""
    return [value for value in values if NIGHT or value in chosen]
