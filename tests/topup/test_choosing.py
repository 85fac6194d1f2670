import math
from collections import Counter

import pytest
import torch

from optimum_neuronal.topup.choosing import bisect, draw, index_of_smallest


@pytest.mark.parametrize("values, index", [([3.0], 0), ([3.0, 1.0, 2.0], 1), ([math.inf, math.inf, 5.0], 2)])
def test_index_of_smallest(values, index):
    assert index_of_smallest(values) == index


def test_of_equal_values_the_first_is_the_smallest():
    assert index_of_smallest([2.0, 1.0, 1.0]) == 1
    assert index_of_smallest([math.inf, math.inf]) == 0


def test_no_value_has_no_smallest():
    with pytest.raises(ValueError):
        index_of_smallest([])


def test_bisect_halves_the_interval_exactly_as_often_as_told():
    asked = []

    def is_too_small(value):
        asked.append(value)
        return value < 0.3

    assert bisect(is_too_small, 0.0, 1.0, 3) == (0.25, 0.375)
    assert asked == [0.5, 0.25, 0.375]
    assert bisect(is_too_small, 0.0, 1.0, 0) == (0.0, 1.0)


def test_bisect_goes_on_until_the_ends_are_neighbours():
    low, high = bisect(lambda value: value < 0.3, -2.0, 2.0, 100)
    assert high == 0.3 and low == math.nextafter(0.3, 0)


def test_bisect_leaves_the_end_that_was_never_wrong():
    assert bisect(lambda value: False, -1.0, 1.0, 60)[0] == -1.0
    assert bisect(lambda value: True, -1.0, 1.0, 60)[1] == 1.0


def test_bisect_takes_conditions_on_tensors():
    weights = torch.tensor([0.25, 0.75], dtype=torch.float64)
    low, high = bisect(lambda shift: ((weights + shift).clamp(0, 1) / 2).sum() < 0.6, -2.0, 2.0, 60)
    assert high == pytest.approx(0.1, abs=1e-15) and low <= high


def test_draws_are_those_of_the_generator_and_cover_all_numbers():
    drawn = [draw(torch.Generator().manual_seed(0), 5) for _ in range(2)]
    assert drawn[0] == drawn[1]
    generator = torch.Generator().manual_seed(0)
    counts = Counter(draw(generator, 3) for _ in range(300))
    assert sorted(counts) == [0, 1, 2] and all(isinstance(value, int) for value in counts)
    assert min(counts.values()) > 70
