import pytest

from optimum_neuronal.display.quantities import format_bytes, format_count, format_duration


@pytest.mark.parametrize(
    "value, count, size",
    [
        (0, "0", "0 bytes"),
        (999, "999", "999 bytes"),
        (12_345, "12,345", "12.35 kB"),
        (1_234_567, "1.23 million", "1.23 MB"),
        (7_000_000_000, "7.00 billion", "7.00 GB"),
        (2 * 10**12, "2.00 trillion", "2.00 TB"),
    ],
)
def test_counts_and_bytes(value, count, size):
    assert (format_count(value), format_bytes(value)) == (count, size)


@pytest.mark.parametrize(
    "seconds, text", [(0.34, "0.34 seconds"), (59.6, "60 seconds"), (90, "1.5 minutes"), (7200, "2.0 hours")]
)
def test_durations(seconds, text):
    assert format_duration(seconds) == text
