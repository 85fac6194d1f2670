import pytest

from optimum_neuronal.comparing.figures.log_axis import log_ticks


@pytest.mark.parametrize(
    "low, high, ticks",
    [
        (0.5, 2000, [1, 10, 100, 1000]),
        (8, 110, [10, 30, 100]),
        (39, 62, [40, 45, 50, 55, 60]),
        (50.1, 52.4, [50.5, 51, 51.5, 52]),
        (3.02, 3.08, [3.03, 3.045, 3.06, 3.075]),
    ],
)
def test_ticks(low, high, ticks):
    assert log_ticks(low, high) == ticks


@pytest.mark.parametrize("low", [1e-3, 0.7, 9.9, 31.4, 2e5])
@pytest.mark.parametrize("times", [1.001, 1.1, 2, 7, 1e3, 1e15])
def test_three_to_ten(low, times):
    ticks = log_ticks(low, low * times)
    assert 3 <= len(ticks) <= 10 and low <= ticks[0] and ticks[-1] <= low * times
