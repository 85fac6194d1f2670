"""benchmarks/gpu.py without a GPU: it runs on the CPU, and neither an error nor lack of time loses other rows."""

import json
import time

import pytest

from benchmarks import gpu, gpu_checks
from optimum_neuronal.saliency import SALIENCIES


def row_of(method, seconds, peak):
    return {"shape": "8b", "method": method, "seconds, all blocks": seconds, "peak GB, all blocks": peak}


@pytest.fixture
def run(monkeypatch, tmp_path):
    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["gpu", "--output", str(tmp_path / "gpu.json"), "--device", "cpu", *arguments])
        gpu.main()

    monkeypatch.setattr(gpu, "REPEATS", 2)
    return run


@pytest.fixture
def small(monkeypatch):
    """Two checks, a packed model and a prune. Return what happens, by name, and can be replaced."""
    parts = {
        "same": lambda: 0.0,
        "near": lambda: 0.1,
        "packed": lambda: {"ratio": 1.5},
        "prune": lambda: {"seconds": 2.0},
    }
    checks = [(name, 0.1, lambda name=name: parts[name]()) for name in ("same", "near")]
    monkeypatch.setattr(gpu, "find_checks", lambda *_: checks)
    monkeypatch.setattr(gpu, "SPARSITIES", (0.6,))
    monkeypatch.setattr(gpu, "TIMED", {gpu.WANDA: {}})
    monkeypatch.setattr(gpu, "time_packed", lambda row, **_: row.update(parts["packed"]()))
    monkeypatch.setattr(gpu, "time_prune", lambda row, **_: row.update(parts["prune"]()))
    monkeypatch.setattr(gpu, "time_finetune", lambda row, **_: row.update({"tokens/s": 3.0}))
    return parts


def results(folder) -> dict:
    return json.loads((folder / "gpu.json").read_text())


def missing(folder) -> dict[str, str]:
    found = results(folder)
    return {gpu.name_of(row): row[gpu.MISSING] for part in gpu.PARTS for row in found[part] if gpu.MISSING in row}


def test_all_saliencies_are_checked():
    assert {fields["saliency"] for fields in gpu_checks.METHODS.values()} == set(SALIENCIES.names())
    assert gpu_checks.ALLOWED.keys() == gpu_checks.METHODS.keys()


@pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules")
def test_it_checks_and_times_everything_on_the_cpu(run, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_checks, "ALLOWED", {gpu.SPARSEGPT: 0.01})
    monkeypatch.setattr(gpu, "SPARSITIES", (0.6,))
    run("--shape", "tiny")
    found = results(tmp_path)
    assert not missing(tmp_path)
    assert len(found["checks"]) == 13 and all(row["difference"] <= row["allowed"] for row in found["checks"])
    assert [row["method"] for row in found["prunes"]] == list(gpu.TIMED)
    for row in found["prunes"]:
        assert row["share of peak"] > 0 and row["seconds, all blocks"] == 2 * row["seconds"]
        assert row["peak GB, all blocks"] > row["peak GB"] > 0
    [packed] = found["packed"]
    assert all(packed[key] > 0 for key in ("prompt", "decode, batch 8", "two blocks, generate, decode, batch 1"))
    assert packed["memory of blocks, packed / dense"] == pytest.approx(0.525, abs=0.02)
    assert packed["largest difference"] < 0.05
    assert found["finetune"][0]["tokens/s"] > 0
    page = (tmp_path / "gpu.md").read_text()
    assert page.startswith("# cpu\n") and all(f"## {title}\n\n|" in page for title in gpu.TITLES.values())
    assert "| `fast`" in page and "Not measured" not in page and "milliseconds" not in page


def test_a_row_that_fails_keeps_its_figures_and_is_measured_again(run, tmp_path, small):
    def fail():
        raise RuntimeError("out of memory")

    small |= {"packed": fail, "near": lambda: 0.2}
    with pytest.raises(SystemExit, match=r"did not pass: near\."):
        run("--shape", "tiny")
    assert missing(tmp_path) == {"tiny, 60%": "RuntimeError: out of memory"}
    assert "| packed | tiny, 60% | RuntimeError: out of memory |" in (tmp_path / "gpu.md").read_text()
    assert results(tmp_path)["prunes"][0]["seconds"] == 2.0
    small |= {"packed": lambda: {"ratio": 1.7}, "prune": fail}
    with pytest.raises(SystemExit, match=r"did not pass: near\."):
        run("--shape", "tiny")
    assert not missing(tmp_path), "what was measured is not measured again"
    assert results(tmp_path)["packed"] == [{"shape": "tiny", "zeros": "60%", "ratio": 1.7}]


def test_what_there_was_no_time_for_is_named(run, tmp_path, small):
    with pytest.raises(SystemExit, match="did not pass: same; near"):
        run("--shape", "tiny", "--minutes", "0")
    assert missing(tmp_path) == dict.fromkeys(
        ["same", "near", "tiny, 60%", "tiny, Wanda", "demonstration"], "out of time after 0 s"
    )


def test_what_is_measured_is_in_the_file_when_a_run_is_interrupted(run, tmp_path, small):
    def interrupt():
        raise KeyboardInterrupt

    small["prune"] = interrupt
    with pytest.raises(KeyboardInterrupt):
        run("--shape", "tiny")
    assert missing(tmp_path) == dict.fromkeys(["tiny, Wanda", "demonstration"], "not reached")
    assert results(tmp_path)["packed"][0]["ratio"] == 1.5


def test_a_row_is_stopped_when_its_time_is_over():
    def measure(row):
        row["first"] = 1
        try:
            time.sleep(60)
        except Exception:
            row["second"] = 2

    row = {gpu.MISSING: "not reached"}
    gpu.fill(row, measure, 0.1)
    assert row == {gpu.MISSING: "out of time after 0 s", "first": 1}


def test_a_file_of_another_machine_is_left_alone(run, tmp_path, small):
    (tmp_path / "gpu.json").write_text('{"machine": {"device": "H100"}}')
    with pytest.raises(SystemExit, match="H100.*choose another --output"):
        run("--shape", "tiny")
    assert results(tmp_path) == {"machine": {"device": "H100"}}


def test_figures_for_the_choice_of_a_method():
    prunes = [
        row_of(*row) for row in ((gpu.WANDA, 1, 1), (gpu.NEURONAL, 4, 2), (gpu.ALPS, 50, 3), (gpu.SPARSEGPT, 20, 4))
    ]
    rows = {row["method"]: row["8b"] for row in gpu.choices(prunes)}
    assert rows["Wanda, NeuronAL"] == "4 seconds, 2.00 GB" and rows["`fast`"] == "50 seconds, 3.00 GB"
    assert rows["the default, by formula"] == "53 seconds, 3.00 GB"
    assert rows["`paper`"] == rows["`best`, by formula"] == gpu.MISSING
    rows = gpu.choices([*prunes, row_of(gpu.REFIT, 30, 5)])
    assert rows[-1]["8b"] == "1.8 minutes, 5.00 GB", "the time of ALPS, and of six epochs"


def test_large_shapes_need_an_accelerator(run, capsys):
    with pytest.raises(SystemExit):
        run()
    assert "--device cpu --shape tiny" in capsys.readouterr().err
