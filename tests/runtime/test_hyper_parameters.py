import math

import pytest

from optimum_neuronal.runtime.hyper_parameters import check_number, check_whole


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
