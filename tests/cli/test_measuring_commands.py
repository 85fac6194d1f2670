import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from optimum_neuronal.cli import measuring_commands
from optimum_neuronal.cli.measuring_commands import task_rows
from optimum_neuronal.comparing import settings
from optimum_neuronal.evaluation import task_names
from optimum_neuronal.evaluation.tasks import TaskResult


OWN = "neuronal:block_lambdas=[0.1],row_lambdas=[0.0,0.1]"


class TestCompare:
    @pytest.fixture
    def arguments(self, dense, tmp_path):
        text = tmp_path / "text.txt"
        own = ("--num-samples", 8, "--num-alignment-samples", 2, "--seq-length", 16, "--max-windows", 4)
        files = ("--model", dense, "--dataset", text, "--evaluate", text, "--output", tmp_path / "out")
        return ["compare", *files, *own]

    def test_tables_and_files(self, run, arguments, tmp_path):
        methods = ("--saliency", "wanda", "magnitude", "--topup", "uniform", OWN)
        shown = run(*arguments, *methods, "--sparsity", 0.5, 0.7)
        lines = [line.split() for line in shown.splitlines() if "%" in line and "wanda" in line or "magnitude" in line]
        assert [line[1:3] for line in lines] == 2 * [
            [saliency, topup] for saliency in ("wanda", "magnitude") for topup in ("uniform", OWN)
        ]
        assert "perplexity text.txt" in shown and "perplexity x dense, 70%" in shown
        out = tmp_path / "out"
        names = ["comparison.csv", "comparison.json", "comparison.md", "results"]
        assert sorted(path.name for path in out.iterdir()) == names
        assert len(json.loads((out / "comparison.json").read_text())["results"]) == 8
        assert run(*arguments, *methods, "--sparsity", 0.5, 0.7) == shown, "seconds included"

    def test_bits(self, run, arguments, tmp_path):
        methods = ("--saliency", "magnitude", "--topup", "uniform", "--sparsity", 0.6)
        shown = run(*arguments, *methods, "--bits-per-weight", 6)
        assert "bits a weight" in shown and "perplexity x dense, 6 bits" in shown
        results = json.loads((tmp_path / "out" / "comparison.json").read_text())["results"]
        assert [result["budget"] for result in results] == [None, 6]
        assert results[1]["bits_per_weight"] < results[0]["bits_per_weight"] / 2
        with pytest.raises(SystemExit, match="bits_per_weight is 12.0: expected a number above 2, at most 9"):
            run(*arguments, *methods, "--bits-per-weight", 12)

    def test_figures(self, run, arguments, tmp_path):
        pytest.importorskip("matplotlib")
        lambdas = [f"neuronal:steps=block,block_lambdas=[{lam}]" for lam in (0.05, 0.1, 0.2)]
        both = ["neuronal:steps=block,block_lambdas=[0.05,0.1,0.2]", "neuronal:block_lambdas=[0.1],row_lambdas=[0.1]"]
        shown = run(*arguments, "--topup", *lambdas, *both, "--sparsity", 0.7, "--plots")
        names = {path.stem.partition("-neuronal")[0] for path in (tmp_path / "out").glob("*.png")}
        expected = {"perplexity-by-seconds", "block-sparsity-wanda-70", "lambda-wanda-70", "row-sparsity-wanda-70"}
        assert names <= expected and {"perplexity-by-seconds", "block-sparsity-wanda-70", "lambda-wanda-70"} <= names
        assert "lambda-wanda-70.svg" in shown

    def test_evidence(self, run, arguments, tmp_path):
        """Flags that are given go before those of the preset."""
        methods = ("--saliency", "magnitude", "--topup", "uniform", "owl", "--sparsity", 0.5, "--bits-per-weight", 6)
        methods += ("--presets", "fast")
        page = tmp_path / "out" / "evidence.md"
        assert str(page) in run(*arguments, *methods, "--preset", "evidence")
        lines = page.read_text().splitlines()
        assert "- Calibration: 8 x 16 tokens of text.txt, seed 0." in lines
        asked = [line.split("|")[2].strip() for line in lines if line.startswith("| ")]
        assert asked == ["asked for", "dense", *["50 % sparsity"] * 3, "6 bits"]
        run(*arguments, *methods, "--preset", "evidence")  # goes on, and writes its own page again

    def test_presets(self, run, arguments, tmp_path, monkeypatch):
        """Those of the preset stay unless the flag is given, which without a value leaves them out."""
        methods = ("--saliency", "magnitude", "--topup", "uniform", "--sparsity", 0.5)
        shown = run(*arguments, *methods, "--presets", "fast")
        assert "preset fast" in shown
        results = json.loads((tmp_path / "out" / "comparison.json").read_text())["results"]
        assert [(one["saliency"], one["topup"]) for one in results] == [("magnitude", "uniform"), ("preset", "fast")]
        with pytest.raises(SystemExit, match="presets is 'slow': expected one of 'paper', 'fast', 'best'"):
            run(*arguments, *methods, "--presets", "slow")
        found = []
        monkeypatch.setattr(settings.ComparisonSettings, "__post_init__", lambda self: found.append(self.presets))
        monkeypatch.setattr(measuring_commands, "load", lambda *_: sys.exit("as far as needed"))
        for own in ((), ("--presets",), ("--presets", "best", "fast")):
            with pytest.raises(SystemExit, match="as far as needed"):
                run(*arguments, *methods, "--preset", "evidence", *own)
        assert found == [["best"], [], ["best", "fast"]]

    def test_a_page_of_others_is_not_replaced(self, run, arguments, tmp_path):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "evidence.md").write_text("mine")
        with pytest.raises(SystemExit, match="evidence.md was not written by a comparison"):
            run(*arguments, "--preset", "evidence")
        assert (tmp_path / "out" / "evidence.md").read_text() == "mine"

    def test_the_exit_status_says_that_something_failed(self, run, arguments, capsys):
        with pytest.raises(SystemExit) as stop:
            run(*arguments, "--saliency", "sparsegpt", "--topup", "uniform", "neuronal:steps=row", "--sparsity", 0.5)
        assert stop.value.code == "compare: 1 of 2 combinations failed, see the table"
        assert "failed: The saliency 'sparsegpt' updates all rows" in capsys.readouterr().out

    def test_tasks_are_checked_first(self, run, arguments, monkeypatch):
        own = Path(__file__).parents[1] / "fixtures" / "tasks"
        monkeypatch.setattr(task_names, "stock_names", lambda: task_names.find_names(own))
        with pytest.raises(SystemExit) as stop:
            run(*arguments, "--tasks", "neuronal_word")
        assert "Did you mean 'neuronal_words'" in stop.value.code


def test_tasks_on_the_command_line(run, dense, tmp_path, monkeypatch):
    pytest.importorskip("lm_eval")
    (tmp_path / "tasks").mkdir()
    tokenizer = AutoTokenizer.from_pretrained(dense, bos_token="w0")
    tokenizer.save_pretrained(dense)
    rows = [{"q": f"w{i} w{i + 1}", "choices": ["w1", "w2"], "gold": i % 2} for i in range(6)]
    (tmp_path / "tasks" / "rows.json").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "tasks" / "pairs.yaml").write_text(
        f"task: pairs\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {tmp_path}/tasks/rows.json\n"
        "test_split: test\noutput_type: multiple_choice\ndoc_to_text: '{{q}}'\ndoc_to_choice: '{{choices}}'\n"
        "doc_to_target: gold\nmetric_list:\n  - metric: acc\n"
    )
    own = ("--seq-length", 16, "--max-windows", 2, "--tasks", "pairs", "--include-path", tmp_path / "tasks")
    shown = run("evaluate", "--model", dense, "--dataset", tmp_path / "text.txt", *own)
    assert "accuracy" in shown and shown.splitlines()[-2].split()[0] == "pairs" and "mean" in shown
    assert "perplexity" in shown
    shown = run("evaluate", "--model", dense, *own[4:])  # no data but the tasks' is asked for
    assert "accuracy" in shown and "perplexity" not in shown
    files = ("--dataset", tmp_path / "text.txt", "--evaluate", tmp_path / "text.txt", "--output", tmp_path / "out")
    methods = ("--saliency", "magnitude", "--topup", "uniform", "--sparsity", 0.5, "--limit", 4)
    checked, check_tasks = [], settings.check_tasks
    monkeypatch.setattr(settings, "check_tasks", lambda *given: (checked.append(given), check_tasks(*given)))
    shown = run("compare", "--model", dense, *files, *methods, *own)
    assert len(checked) == 1, "before the model is loaded, and not again"
    assert "accuracy retained, 50%" in shown and "mean accuracy" in shown


def test_the_mean_of_tasks_comes_last():
    results = {
        "boolq": TaskResult(accuracy=0.5, stderr=0.025, metric="acc", samples=400),
        "rte": TaskResult(accuracy=0.75, stderr=None, metric="acc", samples=1),
    }
    assert task_rows(results) == [["boolq", "50.00%", "2.50%"], ["rte", "75.00%", "-"], ["mean", "62.50%", ""]]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="the device may be there")
def test_a_device_that_is_not_there_is_told_before_any_work(run, tmp_path):
    """Before the model is looked for, which is not there either."""
    for command in ("evaluate", "compare", "speed", "prune"):
        output = ("--output", tmp_path / "out", "--sparsity", 0.5) if command == "prune" else ()
        with pytest.raises(SystemExit, match=f"{command}: error: --device cuda: torch .* cannot compute there"):
            run(command, "--model", "me/absent", "--device", "cuda", *output)
        assert not list(tmp_path.iterdir())


def test_what_can_be_checked_is_checked_before_a_model_is_loaded(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "figures").mkdir()
    for name in ("README.md", "comparison.md", "figures/lambda-mine.svg"):
        (tmp_path / name).write_text("mine")
    for arguments, message in (
        (("evaluate", "--dataset", "missing.txt"), "'missing.txt' does not exist"),
        (("compare", "--dataset", "missing.txt"), "'missing.txt' does not exist"),
        (("compare", "--dataset", "README.md", "--evaluate", "c4"), "file of an unknown kind"),
        (("compare", "--topup", "owl:half_widht=1"), "No combination is possible: .*Did you mean 'half_width'"),
        (("compare", "--output", "README.md"), "README.md is a file"),
        (("compare", "--output", "."), "comparison.md was not written by a comp.* --overwrite"),
        (("compare", "--output", "figures", "--plots"), "lambda-mine.svg was not written by a comp.* --overwrite"),
        (("compare", "--saliency", "magnitude", "--topup", "uniform", "--evaluate", "no.txt"), "'no.txt' does not"),
    ):
        with pytest.raises(SystemExit, match=message):
            run(*arguments, "--model", "me/never-looked-at")
    for flag in ("--max-windows", "--batch-size", "--limit", "--seq-length"):
        with pytest.raises(SystemExit):
            run("evaluate", "--model", "me/never-looked-at", flag, 0)
        assert f"argument {flag}: '0': expected a whole number of at least 1" in capsys.readouterr().err
