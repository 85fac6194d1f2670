import math

import pytest

from optimum_neuronal.comparing.averages import geometric_mean


@pytest.mark.parametrize("values, mean", [([2, 8], 4), ([5], 5), ([0, 7], 0), ([math.inf, 2], math.inf)])
def test_by_hand(values, mean):
    assert geometric_mean(values) == pytest.approx(mean)
    assert geometric_mean([]) is None
