"""benchmarks/gpu.py without a GPU: it runs on the CPU, and neither an error nor lack of time loses other rows."""

import json

import pytest

from benchmarks import gpu, gpu_checks
from optimum_neuronal.saliency import SALIENCIES


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Return what the file holds after a run."""

    def run(*arguments):
        command = ["gpu", "--output", str(tmp_path / "gpu.json"), "--device", "cpu", "--shape", "tiny", *arguments]
        monkeypatch.setattr("sys.argv", command)
        gpu.main()
        return json.loads((tmp_path / "gpu.json").read_text())

    monkeypatch.setattr(gpu, "REPEATS", 2)
    monkeypatch.setattr(gpu, "SPARSITIES", (0.6,))
    return run


@pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules")
def test_it_checks_and_times_everything_on_the_cpu(run, tmp_path, monkeypatch):
    assert {fields["saliency"] for fields in gpu_checks.METHODS.values()} == set(SALIENCIES.names())
    monkeypatch.setattr(gpu_checks, "ALLOWED", {gpu.SPARSEGPT: 0.01})
    found = run()
    assert len(found["checks"]) == 13 and all(row["difference"] <= row["allowed"] for row in found["checks"])
    assert [row["method"] for row in found["prunes"]] == list(gpu.TIMED)
    assert all(row["share of peak"] > 0 and row["peak GB, all blocks"] > row["peak GB"] > 0 for row in found["prunes"])
    [packed] = found["packed"]
    assert packed["memory of blocks, packed / dense"] == pytest.approx(0.525, abs=0.02)
    assert packed["largest difference"] < 0.05 and found["finetune"][0]["tokens/s"] > 0
    page = (tmp_path / "gpu.md").read_text()
    assert "| `fast`" in page and "Not measured" not in page


def test_a_row_that_fails_keeps_its_figures_and_is_measured_again(run, monkeypatch):
    def fail():
        raise RuntimeError("out of memory")

    def time_packed(row, **_):
        row["ratio"] = 1.5
        row["milliseconds"] = parts["packed"]()

    parts = {"near": lambda: 0.1, "packed": fail}
    monkeypatch.setattr(gpu, "TIMED", {gpu.WANDA: {}})
    monkeypatch.setattr(gpu, "find_checks", lambda *_: [("near", 0.1, lambda: parts["near"]())])
    monkeypatch.setattr(gpu, "time_packed", time_packed)
    monkeypatch.setattr(gpu, "time_prune", lambda row, **_: row.update(seconds=2.0))
    monkeypatch.setattr(gpu, "time_finetune", lambda row, **_: row.update({"tokens/s": 3.0}))
    with pytest.raises(SystemExit, match=r"did not pass: near\."):
        run("--minutes", "0")
    found = run()
    assert found["packed"] == [
        {"shape": "tiny", "zeros": "60%", gpu.MISSING: "RuntimeError: out of memory", "ratio": 1.5}
    ]
    assert found["prunes"][0]["seconds"] == 2.0
    parts |= {"near": fail, "packed": lambda: 1}
    found = run()
    assert found["packed"][0]["milliseconds"] == 1 and found["checks"][0]["difference"] == 0.1, "not measured again"
