import json

import pytest
from packed_models import make_zeroed
from transformers import AutoTokenizer

import optimum_neuronal
from optimum_neuronal import save_pretrained
from optimum_neuronal.cli import flags, measuring_commands
from optimum_neuronal.model.sources import Source


def test_tasks_and_perplexity(run, dense, tmp_path):
    pytest.importorskip("lm_eval")
    (tmp_path / "tasks").mkdir()
    AutoTokenizer.from_pretrained(dense, bos_token="w0").save_pretrained(dense)
    rows = [{"q": f"w{i} w{i + 1}", "choices": ["w1", "w2"], "gold": i % 2} for i in range(6)]
    (tmp_path / "tasks" / "rows.json").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "tasks" / "pairs.yaml").write_text(
        f"task: pairs\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {tmp_path}/tasks/rows.json\n"
        "test_split: test\noutput_type: multiple_choice\ndoc_to_text: '{{q}}'\ndoc_to_choice: '{{choices}}'\n"
        "doc_to_target: gold\nmetric_list:\n  - metric: acc\n"
    )
    tasks = ("--tasks", "pairs", "--include-path", tmp_path / "tasks")
    text = tmp_path / "text.txt"
    shown = run("evaluate", "--model", dense, "--dataset", text, "--window", 16, "--max-windows", 2, *tasks)
    assert "metric" in shown and shown.splitlines()[-2].split()[:2] == ["pairs", "acc"] and "perplexity" in shown
    shown = run("evaluate", "--model", dense, *tasks)
    assert "metric" in shown and "perplexity" not in shown
    methods = ("--saliency", "magnitude", "--topup", "uniform", "--sparsity", 0.5, "--limit", 4, "--seq-length", 16)
    files = ("--dataset", text, "--evaluate", text, "--output", tmp_path / "out", "--max-windows", 2)
    shown = run("compare", "--model", dense, *files, *methods, *tasks)
    assert "AccRet, 50%" in shown and "pairs (4 questions)" in shown and "mean accuracy" in shown


def test_windows_with_and_without_bos(run, dense, tmp_path):
    """The last column says which."""
    AutoTokenizer.from_pretrained(dense, bos_token="w0").save_pretrained(dense)
    given = ("evaluate", "--model", dense, "--dataset", tmp_path / "text.txt", "--window", 16, "--max-windows", 2)
    rows = [run(*given, *more).splitlines()[-1].split() for more in ((), ("--add-bos",), ("--no-add-bos",))]
    assert [row[-3:] for row in rows] == [["2", "16", first] for first in ("no", "yes", "no")]
    assert rows[0] == rows[2] and rows[0][1] != rows[1][1]


def test_text_that_does_not_fit_is_found_before_anything_is_measured(run, dense, tmp_path, capsys):
    (tmp_path / "short.txt").write_text("w1")
    with pytest.raises(SystemExit, match="fewer than one window of 16"):
        run("evaluate", "--model", dense, "--dataset", tmp_path / "text.txt", tmp_path / "short.txt", "--window", 16)
    assert "measuring" not in capsys.readouterr().err


@pytest.mark.parametrize("format", ["dense", "packed"])
def test_speed(run, tmp_path, format):
    save_pretrained(make_zeroed("llama"), tmp_path / "sparse", format=format)
    few = ("--batches", 1, 2, "--prompt-tokens", 8, "--new-tokens", 2, "--rounds", 1)
    shown = run("speed", "--model", tmp_path / "sparse", *few)
    assert all(work in shown for work in ("decode, batch 1", "decode, batch 2", "prefill, 8 tokens"))
    assert "timing decode, batch 2\n" in run.err
    assert float(shown.split()[-1]) < 0.9, "the packed model's share of the memory"
    with pytest.raises(SystemExit, match="of 999 tokens do not fit"):
        run("speed", "--model", tmp_path / "sparse", "--prompt-tokens", 999)


def test_answers(run, dense, tmp_path, monkeypatch):
    """What locates the sparse model, such as the name of a GGUF file, does not locate the teacher."""
    (tmp_path / "prompts.txt").write_text("w1 w2\nw3\n")
    (load, seen), source = (measuring_commands.load_model, []), Source(dense, {"subfolder": ""})
    monkeypatch.setattr(flags, "source_of", lambda _: source)
    monkeypatch.setattr(measuring_commands, "load_model", lambda *one, **how: seen.append(how) or load(*one, **how))
    given = ("--model", dense, "--teacher", dense, "--prompts", tmp_path / "prompts.txt", "--max-new-tokens", 4)
    shown = run("answers", *given)
    assert shown.count("dense:") == shown.count("sparse:") == 2 and "100.0%" in shown
    assert "subfolder" not in seen[0]


def test_env_shows_what_computes_here(run):
    table = run("env")
    assert optimum_neuronal.__version__ in table and "kernel in use" in table and "threads" in table
