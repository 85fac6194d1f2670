import json
import sys

import pytest
from packed import make_zeroed


@pytest.fixture
def sparse(tmp_path):
    make_zeroed("llama").save_pretrained(tmp_path / "sparse")
    return tmp_path / "sparse"


FEW = ("--batches", 1, 2, "--prompt-tokens", 8, "--new-tokens", 2, "--rounds", 1)


def test_a_table_and_a_figure(run, sparse, tmp_path):
    printed = run("speed", "--model", sparse, *FEW, "--plots", tmp_path / "figure")
    for part in ("decode, batch 1", "decode, batch 2", "prefill, 8 tokens", "memory", "Packed weights are"):
        assert part in printed
    assert (tmp_path / "figure.png").exists() and (tmp_path / "figure.svg").exists()


def test_values_of_few_bits(run, sparse, tmp_path):
    flags = ("--value-bits", 4, "--activations", "bf16", "--plots", tmp_path / "figure")
    assert "4 bits, bf16" in run("speed", "--model", sparse, *FEW, *flags)
    assert (tmp_path / "figure.png").exists()


def test_json(run, sparse):
    found = json.loads(run("speed", "--model", sparse, *FEW, "--json"))
    assert len(found["timings"]) == 3 and found["packed_bytes"] < found["dense_bytes"]
    if sys.platform == "linux":
        assert found["resident"].keys() == {"dense", "packed"}, "measured by the system"


def test_mistakes_are_found_before_loading(run, tmp_path):
    with pytest.raises(SystemExit, match="speed: error: The folder of --plots"):
        run("speed", "--model", tmp_path, "--plots", tmp_path / "none" / "figure")
