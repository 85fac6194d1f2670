import json
import os
import subprocess
import sys
from dataclasses import MISSING, fields

import pytest
import torch
from conftest import make_model
from safetensors.torch import load_file, save_file
from sparse_checkpoints import save_pruned
from transformers import AutoTokenizer

from optimum.commands import optimum_cli
from optimum_neuronal import NeuronALConfig
from optimum_neuronal.cli.config_flags import CONFIG_FLAGS
from optimum_neuronal.demo import run as demo
from optimum_neuronal.topup.neuronal import NeuronAL


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs `optimum-cli neuronal ...` in this process and returns what it printed."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["optimum-cli", "neuronal", *map(str, arguments)])
        optimum_cli.main()
        return capsys.readouterr().out

    return call


@pytest.fixture
def dense(tmp_path, tokenizer):
    """A saved model with its tokenizer, and a text that both know."""
    make_model("llama", vocab_size=256).save_pretrained(tmp_path / "dense")
    tokenizer.save_pretrained(tmp_path / "dense")
    (tmp_path / "text.txt").write_text(" ".join(f"w{(i * 7) % 60}" for i in range(2000)))
    return tmp_path / "dense"


SMALL = ("--num-samples", 8, "--num-alignment-samples", 2, "--seq-length", 16, "--block-lambdas", 0.05, 0.1)
SMALL += ("--topup", "neuronal")


def test_optimum_cli_lists_the_commands():
    """The installed plug-in, in a process of its own."""
    command = os.path.join(os.path.dirname(sys.executable), "optimum-cli")
    result = subprocess.run([command, "neuronal", "--help"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    for name in ("prune", "evaluate", "compare", "inspect", "convert", "demo"):
        assert name in result.stdout


def test_every_field_has_a_flag_with_the_configs_default(run, capsys):
    flags = {name: default for name, (default, _, _) in CONFIG_FLAGS.items()}
    described = {
        "seq_length",
        "batch_size",
        "max_hidden_bytes",
        "targets",
        "ignore",
        "pattern",
    }  # None there, told in words here
    without_flag = {"saliency_args", "topup_args"}  # dicts, for Python
    for entry in fields(NeuronALConfig):
        if entry.name in without_flag:
            continue
        shown = flags.pop(entry.name)
        if entry.default is MISSING:
            assert shown is None
        elif entry.name in described:
            assert entry.default is None
        else:
            assert shown == str(entry.default)
    for entry in fields(NeuronAL):  # those that are understood as if they were fields of the config
        if isinstance(entry.default, tuple):
            assert [float(value) for value in flags.pop(entry.name).split()] == list(entry.default)
        elif entry.name in flags:
            assert flags.pop(entry.name) == str(entry.default)
    assert not flags
    with pytest.raises(SystemExit) as stop:
        run("prune", "--help")
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for line in text.split("\n  --")[1:]:
        assert "(default:" in line or "(required)" in line, line


def test_streaming_gives_the_same_model(run, dense, tmp_path):
    for name, flags in (("whole", ()), ("streamed", ("--stream", "--device", "cpu"))):
        run("prune", "--model", dense, "--output", tmp_path / name, "--sparsity", 0.7, "--dataset", tmp_path / "text.txt",
            *SMALL, *flags)  # fmt: skip
    whole, streamed = ({}, {})
    for name, weights in (("whole", whole), ("streamed", streamed)):
        for file in (tmp_path / name).glob("*.safetensors"):
            weights.update(load_file(file))
    assert whole.keys() == streamed.keys() and all(torch.equal(whole[key], streamed[key]) for key in whole)
    assert not list(tmp_path.glob(".*")), "the folder for rewritten weights is gone"


def test_the_packed_format_on_the_command_line(run, dense, tmp_path):
    printed = run("prune", "--model", dense, "--output", tmp_path / "packed", "--sparsity", 0.7, "--saliency", "magnitude",
                  "--topup", "uniform", "--format", "packed")  # fmt: skip
    assert "import optimum_neuronal" in printed
    assert (tmp_path / "packed" / "packed-00001-of-00001.safetensors").exists()
    assert not (tmp_path / "packed" / "model.safetensors").exists()
    (tmp_path / "text.txt").write_text(" ".join(f"w{(i * 7) % 60}" for i in range(200)))
    printed = run("evaluate", "--model", tmp_path / "packed", "--dataset", tmp_path / "text.txt", "--seq-length", 16)
    assert "perplexity" in printed


def test_an_interrupted_prune_goes_on(run, dense, tmp_path, monkeypatch):
    arguments = ["prune", "--model", dense, "--sparsity", 0.7, "--dataset", tmp_path / "text.txt", *SMALL]
    run(*arguments, "--output", tmp_path / "undisturbed")

    def interrupt(*_args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("optimum_neuronal.pruner.apply_changes", interrupt)
        with pytest.raises(SystemExit, match="interrupted: the same command goes on from here; .*delete .*unfinished"):
            run(*arguments, "--output", tmp_path / "sparse")
    assert (tmp_path / ".sparse.unfinished").exists() and not (tmp_path / "sparse").exists()
    with pytest.raises(SystemExit, match="begun otherwise: sparsity was 0.7, is 0.6"):
        run(*[0.6 if value == 0.7 else value for value in arguments], "--output", tmp_path / "sparse")
    run(*arguments, "--output", tmp_path / "sparse")
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("undisturbed", "sparse"))
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert not (tmp_path / ".sparse.unfinished").exists()


def test_prune_saves_a_model_that_evaluate_reads(run, dense, tmp_path):
    output = tmp_path / "sparse"
    text = tmp_path / "text.txt"
    arguments = [
        "--model",
        dense,
        "--output",
        output,
        "--sparsity",
        0.7,
        "--dataset",
        text,
        "--evaluate",
        text,
        *SMALL,
    ]
    printed = run("prune", *arguments)
    report = json.loads((output / "neuronal_report.json").read_text())
    assert report["evaluation"]["text.txt"].keys() == {"dense", "pruned"} and "perplexity, text.txt" in printed
    assert f"{report['evaluation']['text.txt']['pruned']:.2f}" in (output / "README.md").read_text()
    assert report["achieved_sparsity"] == pytest.approx(0.7, abs=1e-3)
    assert [c["lambda"] for c in report["decisions"]["block"]["candidates"]] == [0.05, 0.1]
    assert report["calibration"]["source"] == "text.txt"
    assert (
        "sparsity" in printed and "lambda of the block step" in printed and f'from_pretrained("{output}")' in printed
    )
    assert (output / "tokenizer.json").exists()
    lines = run("evaluate", "--model", output, "--dataset", text, "--seq-length", 16, "--max-windows", 3).split("\n")
    assert lines[1].split() == ["dataset", "perplexity"] and float(lines[3].split()[1]) > 1


@pytest.mark.parametrize(
    "changed, message",
    [
        (("--sparsity", "70"), "prune: error: sparsity is 70.0: expected a share .* Did you mean 0.7"),
        (("--saliency", "wnada"), "Did you mean 'wanda'"),
        (("--dataset", "missing.txt"), "missing.txt"),
        (("--model", "./nowhere"), "nowhere"),
        (("--targets", "qqq"), "match no projection"),
        (("--seq-length", "1000"), "admits 1 to 64 tokens"),
        (("--num-samples", "1000"), "holds 2000 tokens"),
        (("--steps", "rows"), "prune: error: steps is 'rows': .* Did you mean 'row'"),
    ],
)
def test_errors_are_one_line_and_leave_no_files(run, dense, tmp_path, changed, message):
    arguments = {
        "--model": dense,
        "--output": tmp_path / "sparse",
        "--sparsity": 0.7,
        "--dataset": tmp_path / "text.txt",
        "--num-samples": 8,
        "--seq-length": 16,
    }
    arguments |= dict([changed])
    before = sorted(tmp_path.iterdir())
    with pytest.raises(SystemExit, match=message) as stop:
        run("prune", *(part for pair in arguments.items() for part in pair))
    assert "\n" not in str(stop.value.code)
    assert sorted(tmp_path.iterdir()) == before


def test_an_output_that_is_a_file_is_refused_before_loading(run, tmp_path):
    file = tmp_path / "file"
    file.write_text("precious")
    with pytest.raises(SystemExit, match="file is a file. Choose another directory"):
        run("prune", "--model", "./never-looked-at", "--output", file, "--sparsity", 0.7)
    assert file.read_text() == "precious"


def test_demo(run, tmp_path, monkeypatch):
    """The whole of it, with fewer sequences and lambdas."""
    small = {"num_samples": 4, "num_alignment_samples": 2}
    lambdas = {"block_lambdas": (0.05, 0.1), "row_lambdas": (0.0, 0.1)}
    methods = {"magnitude, uniform": {}, "Wanda, uniform": small, "Wanda, NeuronAL": small | lambdas}
    methods["Wanda, search"] = small | {"topup_args": {"budget": 8}}
    merged = {name: fields | methods[name] for name, fields in demo.METHODS.items()}
    monkeypatch.setattr(demo, "METHODS", merged)
    monkeypatch.setattr(demo, "TEST_WINDOWS", 2)
    printed = run("demo", "--output", tmp_path / "model")
    assert "Dense perplexity:" in printed and printed.count("%  Wanda, NeuronAL  ") == 3
    assert printed.count(" loses least. Perplexity, in multiples of the dense model's: ") == 3
    assert "The 70% sparse model (Wanda, search) is saved in" in printed
    assert "70.00% of the projections' weights are zero" in printed
    assert (tmp_path / "model" / "model.safetensors").exists()


def test_the_verdict_says_who_loses_least():
    perplexities = {(s, demo.OURS): 20.0 + s for s in demo.SPARSITIES}
    perplexities |= {(s, demo.BASELINE): 20.65 for s in demo.SPARSITIES}
    perplexities |= {(s, demo.PAPER): 21.5 - s for s in demo.SPARSITIES}
    first, *_, last = demo._verdict(perplexities, 10.0).split("\n")
    assert first.startswith("At 60% Wanda, search loses least.")
    assert first.endswith("2.06 with Wanda, uniform; 2.09 with Wanda, NeuronAL; 2.06 with Wanda, search.")
    assert last.startswith("At 80% Wanda, uniform loses least.")


def test_the_tiny_model_is_small_and_comes_with_its_licence():
    assert sum(file.stat().st_size for file in demo.TINY_MODEL.iterdir()) < 6e6
    assert "Python Software Foundation" in (demo.TINY_MODEL / "NOTICE").read_text()


class TestCompare:
    @pytest.fixture
    def arguments(self, dense, tmp_path):
        text = tmp_path / "text.txt"
        own = ("--num-samples", 8, "--num-alignment-samples", 2, "--seq-length", 16, "--max-windows", 4)
        files = ("--model", dense, "--dataset", text, "--evaluate", text, "--output", tmp_path / "out")
        return ["compare", *files, *own]

    def test_tables_and_files(self, run, arguments, tmp_path):
        methods = ("--saliency", "wanda", "magnitude", "--topup", "uniform", "neuronal:block_lambdas=[0.1]")
        shown = run(*arguments, *methods, "--sparsity", 0.5, 0.7, "--row-lambdas", 0.0, 0.1)
        lines = [line.split() for line in shown.splitlines() if "%" in line and "wanda" in line or "magnitude" in line]
        assert [line[1:3] for line in lines] == 2 * [
            [saliency, topup]
            for saliency in ("wanda", "magnitude")
            for topup in ("uniform", "neuronal:block_lambdas=[0.1]")
        ]
        assert "perplexity text.txt" in shown and "perplexity x dense, 70%" in shown
        out = tmp_path / "out"
        assert sorted(path.name for path in out.iterdir()) == [
            "comparison.csv",
            "comparison.json",
            "comparison.md",
            "results",
        ]
        assert len(json.loads((out / "comparison.json").read_text())["results"]) == 8
        assert run(*arguments, *methods, "--sparsity", 0.5, 0.7, "--row-lambdas", 0.0, 0.1) == shown, (
            "seconds included"
        )

    def test_figures(self, run, arguments, tmp_path):
        pytest.importorskip("matplotlib")
        lambdas = [f"neuronal:steps=block,block_lambdas=[{lam}]" for lam in (0.05, 0.1, 0.2)]
        both = ["neuronal:steps=block,block_lambdas=[0.05,0.1,0.2]", "neuronal:block_lambdas=[0.1],row_lambdas=[0.1]"]
        shown = run(*arguments, "--topup", *lambdas, *both, "--sparsity", 0.7, "--plots")
        names = {path.stem.partition("-neuronal")[0] for path in (tmp_path / "out").glob("*.png")}
        expected = {"perplexity-by-seconds", "block-sparsity-wanda-70", "lambda-wanda-70", "row-sparsity-wanda-70"}
        assert names <= expected and {"perplexity-by-seconds", "block-sparsity-wanda-70", "lambda-wanda-70"} <= names
        assert "lambda-wanda-70.svg" in shown

    def test_the_exit_status_says_that_something_failed(self, run, arguments, capsys):
        with pytest.raises(SystemExit) as stop:
            run(*arguments, "--saliency", "sparsegpt", "--topup", "uniform", "neuronal:steps=row", "--sparsity", 0.5)
        assert stop.value.code == "compare: 1 of 2 combinations failed, see the table"
        assert "failed: The saliency 'sparsegpt' updates all rows" in capsys.readouterr().out

    def test_tasks_are_checked_first(self, run, arguments):
        pytest.importorskip("lm_eval")
        with pytest.raises(SystemExit) as stop:
            run(*arguments, "--tasks", "hellaswagg")
        assert "Did you mean 'hellaswag'" in stop.value.code


def test_tasks_on_the_command_line(run, dense, tmp_path):
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
    files = ("--dataset", tmp_path / "text.txt", "--evaluate", tmp_path / "text.txt", "--output", tmp_path / "out")
    methods = ("--saliency", "magnitude", "--topup", "uniform", "--sparsity", 0.5, "--limit", 4)
    shown = run("compare", "--model", dense, *files, *methods, *own)
    assert "accuracy retained, 50%" in shown and "mean accuracy" in shown


def test_methods_with_hyper_parameters_on_the_command_line(run, dense, tmp_path):
    own = ("--saliency", "ria:power=1.0", "--topup", "neuronal:steps=block,block_lambdas=[0.1]")
    run(
        "prune",
        "--model",
        dense,
        "--dataset",
        tmp_path / "text.txt",
        "--sparsity",
        0.5,
        *SMALL[:6],
        *own,
        "--output",
        tmp_path / "o",
    )
    config = json.loads((tmp_path / "o" / "config.json").read_text())["sparsity_config"]["config"]
    assert config["saliency"] == "ria" and config["saliency_args"] == {"power": 1.0}
    assert config["topup_args"] == {"steps": "block", "block_lambdas": [0.1]}


@pytest.mark.parametrize("saliency", ["magnitude", "wanda", "sparsegpt"])
def test_a_pattern_on_the_command_line(run, dense, tmp_path, saliency):
    own = ("--saliency", saliency, "--topup", "uniform", "--pattern", "2:4", "--sparsity", 0.5, *SMALL[:6])
    run("prune", "--model", dense, "--dataset", tmp_path / "text.txt", *own, "--output", tmp_path / "o")
    weights = {
        name: value for name, value in load_file(tmp_path / "o" / "model.safetensors").items() if "_proj" in name
    }
    for name, weight in weights.items():
        assert ((weight.view(len(weight), -1, 4) != 0).sum(dim=-1) == 2).all(), name


@pytest.fixture
def sparse(tmp_path):
    save_pruned(tmp_path / "sparse")
    return tmp_path / "sparse"


def test_inspect_tells_and_verifies(run, sparse, capsys):
    text = run("inspect", sparse)
    assert "magnitude + uniform" in text and "model.layers.2" in text and "mlp.down_proj" in text
    assert text.strip().endswith("Verified: the zeros agree with the sparsity_config.")
    values = json.loads(run("inspect", sparse, "--json"))
    assert values["format"] == "dense" and values["problems"] == []
    weights = load_file(sparse / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"].fill_(1)
    save_file(weights, sparse / "model.safetensors", metadata={"format": "pt"})
    for flags in ((), ("--json",)):
        with pytest.raises(SystemExit) as stop:
            run("inspect", sparse, *flags)
        assert stop.value.code == 1
    assert "NOT as recorded: the model has 1,0" in capsys.readouterr().out


def test_inspect_needs_no_torch_model(run, sparse, monkeypatch):
    """A model type that nobody knows, and code that comes with it, are no obstacle and are not run."""
    config = json.loads((sparse / "config.json").read_text())
    config |= {"model_type": "of-tomorrow", "auto_map": {"AutoModelForCausalLM": "modeling.Evil"}}
    (sparse / "config.json").write_text(json.dumps(config))
    (sparse / "modeling.py").write_text("raise SystemExit('was run')")
    assert "of-tomorrow" in run("inspect", sparse)
    run("convert", sparse, "--format", "packed")
    assert "of-tomorrow" in run("inspect", sparse) and (sparse / "modeling.py").exists()


def test_convert_there_and_back(run, sparse, tmp_path):
    before = load_file(sparse / "model.safetensors")
    assert "packed: 0.1 MB became 0.1 MB" in run(
        "convert", sparse, "--format", "packed", "--output", tmp_path / "packed"
    )
    assert "Verified" in run("inspect", tmp_path / "packed")
    run("convert", tmp_path / "packed", "--format", "dense", "--max-shard-size", "20KB")
    assert len(list((tmp_path / "packed").glob("model-*.safetensors"))) > 2
    after = {}
    for file in (tmp_path / "packed").glob("*.safetensors"):
        after |= load_file(file)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    with pytest.raises(SystemExit, match="convert: error: .* is dense already"):
        run("convert", sparse, "--format", "dense")
    with pytest.raises(SystemExit, match="inspect: error: .* is neither a directory nor the id"):
        run("inspect", tmp_path / "absent")
