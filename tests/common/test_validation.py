import math
import re
from dataclasses import dataclass, fields

import numpy as np
import pytest

from optimum_neuronal.common.validation import check_count, check_field, check_number, hyper


def test_counts():
    for value in (2, np.int64(3)):
        check_count("rounds", value, 2)
    for value, error in ((1, ValueError), (2.0, TypeError), ("2", TypeError), (True, TypeError), (None, TypeError)):
        with pytest.raises(error, match=f"rounds is {value!r}: expected a whole number of at least 2"):
            check_count("rounds", value, 2)


def test_numbers():
    for value in (0, 0.5, 1, np.float32(0.25)):
        check_number("share", value, 0, 1)
    check_number("rate", 1e300, 0)
    for value, error in ((-0.01, ValueError), (1.5, ValueError), (math.nan, ValueError), (math.inf, ValueError),
                         ("0.5", TypeError), (None, TypeError), (True, TypeError)):  # fmt: skip
        with pytest.raises(error) as caught:
            check_number("share", value, 0, 1)
        assert str(caught.value) == f"share is {value!r}: expected a number from 0 to 1."
    with pytest.raises(ValueError, match="rate is inf: expected a number of at least 0.5"):
        check_number("rate", math.inf, 0.5)
    with pytest.raises(ValueError, match="rate is 0: expected a number above 0, at most 1"):
        check_number("rate", 0, 0, 1, above=True)


@dataclass(frozen=True)
class Made:
    count: int | None = hyper(None, 2)
    rate: float = hyper(0.5, 0, 1, above=True)
    widths: tuple[float, ...] = hyper((0.1,), 0, 1)
    by: str = hyper("kl", choices=("kl", "nll"))
    on: bool = True
    free: str = "anything"


def test_hyper_parameters_are_checked_by_the_bounds_beside_their_fields():
    given = {"count": None, "rate": 1, "widths": [0, 1], "by": "nll", "on": False, "free": 7}
    known = {entry.name: entry for entry in fields(Made)}
    assert Made(**{name: check_field(known[name], value) for name, value in given.items()}) == Made(
        None, 1, (0.0, 1.0), "nll", False, 7
    )
    for given, error, message in (
        ({"count": 1}, ValueError, "count is 1: expected a whole number of at least 2"),
        ({"rate": 0}, ValueError, "rate is 0: expected a number above 0, at most 1"),
        ({"widths": [0.1, 2]}, ValueError, "widths is 2: expected a number from 0 to 1"),
        ({"by": "kll"}, ValueError, "by is 'kll': expected one of 'kl', 'nll'. Did you mean 'kl'?"),
        ({"on": 1}, TypeError, "on is 1: expected True or False"),
    ):
        with pytest.raises(error, match=re.escape(message)):
            [check_field(known[name], value) for name, value in given.items()]
