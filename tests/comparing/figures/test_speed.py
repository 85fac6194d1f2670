import pytest
from example_figures import texts

from optimum_neuronal.comparing.figures.speed import plot_speed


REPORT = {
    "model": "llama-70",
    "dtype": "bfloat16",
    "threads": 2,
    "dense_bytes": 100,
    "packed_bytes": 40,
    "timings": [
        {"work": "decode, batch 1", "dense": 5.0, "packed": 12.0, "ratio": 2.4},
        {"work": "prefill, 512 tokens", "dense": 90.0, "packed": 85.0, "ratio": 0.94},
    ],
}


def test_labels(tmp_path):
    written = set(texts(plot_speed(REPORT, tmp_path / "speed")))
    assert {"2.40 times", "0.94 times", "decode, batch 1", "dense weights", "packed weights"} < written
    assert "llama-70, bfloat16, 2 threads: packed, 0.40 of the bytes" in written


def test_other_forms_beside(tmp_path):
    beside = {"others": {"4 bits, int8": 20.0}, "other_ratios": {"4 bits, int8": 4.0}}
    written = set(texts(plot_speed({**REPORT, "timings": [REPORT["timings"][0] | beside]}, tmp_path / "speed")))
    assert {"2.40, 4.00 times", "4 bits, int8"} < written


def test_nothing_to_draw(tmp_path):
    with pytest.raises(ValueError, match="no timings"):
        plot_speed({**REPORT, "timings": []}, tmp_path / "speed")
