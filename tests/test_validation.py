import math
from pathlib import Path

import numpy as np
import pytest

from optimum_neuronal.validation import (
    check_count,
    check_number,
    check_path,
    check_several,
    check_texts,
    check_whole,
)


def test_paths():
    assert (check_path("output", "a/b"), check_path("output", Path("a/b"))) == ("a/b", "a/b")
    with pytest.raises(TypeError, match="output is a bytes: expected a path"):
        check_path("output", b"a")
    with pytest.raises(ValueError, match="output is empty"):
        check_path("output", "")


def test_several_of_anything_that_holds_some():
    assert check_several("sparsities", np.array([0.5, 0.6]), "[0.6]") == [0.5, 0.6]
    assert check_several("sparsities", (s / 10 for s in (5, 6)), "[0.6]") == [0.5, 0.6]
    for value in (0.5, "0.5", {"a": 1}, dict, None):
        with pytest.raises(TypeError, match=r"sparsities is .*: expected several, such as \[0.6\]"):
            check_several("sparsities", value, "[0.6]")


def test_texts_are_texts_and_long_values_are_not_shown():
    assert check_texts("tasks", ("boolq", "rte"), "['boolq']") == ["boolq", "rte"]
    with pytest.raises(TypeError, match="tasks holds 3: expected text"):
        check_texts("tasks", ["boolq", 3], "['boolq']")
    with pytest.raises(TypeError, match="tasks holds a list: expected text"):
        check_texts("tasks", [list(range(100))], "['boolq']")


def test_counts():
    for value in (2, np.int64(3)):
        check_count("rounds", value, 2)
    for value, error in ((1, ValueError), (2.0, TypeError), ("2", TypeError), (True, TypeError), (None, TypeError)):
        with pytest.raises(error, match=f"rounds is {value!r}: expected a whole number of at least 2"):
            check_count("rounds", value, 2)


@pytest.mark.parametrize("value", [2, 3, 10**20])
def test_whole_numbers_from_the_least_on_pass(value):
    check_whole("rounds", value, 2)


@pytest.mark.parametrize("value", [1, -3, 2.0, "2", None, True])
def test_what_is_no_whole_number_or_too_small_is_refused_by_name(value):
    with pytest.raises(ValueError) as error:
        check_whole("rounds", value, 2)
    assert str(error.value) == f"rounds is {value!r}: expected a whole number of at least 2."


@pytest.mark.parametrize("value", [0, 0.5, 1, 1.0])
def test_numbers_pass_up_to_both_bounds(value):
    check_number("share", value, 0, 1)


@pytest.mark.parametrize("value", [-0.01, 1.5, math.nan, math.inf, "0.5", None, True])
def test_what_is_no_number_or_out_of_bounds_is_refused_by_name(value):
    with pytest.raises(ValueError) as error:
        check_number("share", value, 0, 1)
    assert str(error.value) == f"share is {value!r}: expected a number from 0 to 1."


def test_without_an_upper_bound_a_number_still_has_to_be_finite():
    check_number("rate", 1e300, 0)
    with pytest.raises(ValueError, match="rate is inf: expected a number of at least 0.5"):
        check_number("rate", math.inf, 0.5)
