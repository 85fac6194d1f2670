"""benchmarks/gpu.py without a GPU: it runs on the CPU, and neither an error nor lack of time loses other rows."""

import json

import pytest

from benchmarks import gpu


@pytest.fixture
def run(monkeypatch, tmp_path):
    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["gpu", "--output", str(tmp_path / "gpu.json"), "--device", "cpu", *arguments])
        gpu.main()

    monkeypatch.setattr(gpu, "REPEATS", 2)
    return run


def tables(folder) -> dict[str, list[dict]]:
    return json.loads((folder / "gpu.json").read_text())


@pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules")
def test_it_checks_and_times_everything_on_the_cpu(run, tmp_path, capsys):
    run("--shape", "tiny")
    results = tables(tmp_path)
    assert not [row["error"] for rows in results.values() for row in rows if "error" in row]
    assert len(results["checks"]) == 10 and all(row["difference"] <= row["allowed"] for row in results["checks"])
    assert [row["method"] for row in results["prunes"]] == [gpu.CAPTURE, *gpu.METHODS]
    for row in results["prunes"]:
        assert row["share of peak"] > 0 and row["seconds, all blocks"] == 2 * row["seconds"]
        assert row["peak GB, all blocks"] > row["peak GB"] > 0
    packed = results["packed, dense time / packed time"]
    assert [row["sparsity"] for row in packed] == ["50%", "60%", "70%", "80%"]
    assert all(row["product, 1 tokens"] > 0 and row["decode, batch 1"] > 0 for row in packed)
    printed = capsys.readouterr().out
    assert all(f"{name}\n\n|" in printed for name in results) and "phases" not in printed


def test_a_row_that_fails_says_so_and_the_others_count(run, tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(gpu, "METHODS", {gpu.NEURONAL: gpu.METHODS[gpu.NEURONAL]})
    monkeypatch.setattr(gpu, "find_checks", lambda *_: [("fails", 0.0, fail), ("differs", 0.1, lambda: 0.2)])
    monkeypatch.setattr(gpu, "packed_figures", fail)
    with pytest.raises(SystemExit, match="Failed checks: fails; differs"):
        run("--shape", "tiny")
    results = tables(tmp_path)
    assert results["checks"][0]["error"] == results["packed, dense time / packed time"][0]["error"]
    assert results["checks"][0]["error"] == "RuntimeError: out of memory" and len(results["prunes"]) == 2


def test_no_row_starts_after_the_time_is_over(run, tmp_path):
    with pytest.raises(SystemExit, match="Failed checks"):
        run("--shape", "tiny", "--minutes", "0")
    rows = [row for name, rows in tables(tmp_path).items() if name != "machine" for row in rows]
    assert {row["error"] for row in rows} == {"TimeoutError: not started: out of time"}


def test_large_shapes_need_an_accelerator(run, capsys):
    with pytest.raises(SystemExit):
        run()
    assert "--device cpu --shape tiny" in capsys.readouterr().err
