import json
import re
import socket
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import datasets
import pytest
import torch
from sparse_checkpoints import same, tensors_of
from transformers import AutoTokenizer

from optimum_neuronal import PruningReport
from optimum_neuronal.cli import flags as cli_flags
from optimum_neuronal.cli.neuronal_command import make_parsers
from optimum_neuronal.cli.prune_command import PruneCommand
from optimum_neuronal.evaluation import perplexity


SMALL = ("--num-samples", 8, "--num-alignment-samples", 2, "--seq-length", 16)
TUNED = ("--topup", "neuronal:block_lambdas=[0.05,0.1],row_lambdas=[0.0,0.1]", "--saliency", "wanda", *SMALL)
PLAIN = ("--saliency", "magnitude", "--topup", "uniform")
WANDA = ("--saliency", "wanda", "--topup", "uniform", *SMALL)


def equal(one, other):
    return same(tensors_of(one), tensors_of(other))


def test_prune_saves_a_model_that_evaluate_reads(run, dense, tmp_path, monkeypatch):
    output, text = tmp_path / "sparse", tmp_path / "text.txt"
    read, load = [], perplexity.load_documents
    monkeypatch.setattr(perplexity, "load_documents", lambda name, *more: read.append(name) or load(name, *more))
    given = ("--model", dense, "--output", output, "--sparsity", 0.7, "--dataset", text, "--evaluate", text)
    printed = run("prune", *given, *TUNED)
    assert read == [str(text)], "once, for both measurements"
    report = json.loads((output / "neuronal_report.json").read_text())
    assert report["evaluation"]["text.txt"].keys() == {"dense", "pruned", "windows", "window", "bos"}
    assert "perplexity, text.txt, 16 x 64 tokens" in printed
    assert report["achieved_sparsity"] == pytest.approx(0.7, abs=1e-3)
    assert [c["lambda"] for c in report["decisions"]["block"]["candidates"]] == [0.05, 0.1]
    assert f"Saved to {output} in float32 (--save-dtype bfloat16 halves it). Load it with:" in printed
    assert f'from_pretrained("{output}")' in printed and (output / "tokenizer.json").exists()
    lines = run("evaluate", "--model", output, "--dataset", text, "--window", 16, "--max-windows", 3).split("\n")
    assert lines[1].split()[:3] == ["dataset", "perplexity", "windows"]
    _, value, windows, tokens, first = lines[3].split()
    assert float(value) > 1 and (windows, tokens, first) == ("3", "16", "no")


@pytest.mark.parametrize("sparsity, dense_value", [(0.9, 1.01), (0.5, 1e9)])
def test_the_summary_says_what_was_lost(sparsity, dense_value, run, dense, tmp_path, monkeypatch):
    """Without --evaluate, on sequences that the prune did not use. Only the dense model's perplexity is made up."""
    words = torch.randint(60, (2000,), generator=torch.Generator().manual_seed(0))
    (tmp_path / "words.txt").write_text(" ".join(f"w{word}" for word in words))
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("w1 w2 w3\n\nw4")
    measured, measure = [], perplexity.evaluate_perplexity

    def first_is_made_up(model, tokenizer, windows, batch_size):
        measured.append(windows.ids)
        return dense_value if len(measured) == 1 else measure(model, tokenizer, windows)

    monkeypatch.setattr(perplexity, "evaluate_perplexity", first_is_made_up)
    given = ("--model", dense, "--dataset", tmp_path / "words.txt", *WANDA)
    shown = run("prune", *given, "--sparsity", sparsity, "--output", tmp_path / "sparse", "--answers", prompts)
    assert len(measured) == 2 and measured[0].shape[1] == 16
    assert "perplexity, held-out calibration text, 4 x 16 tokens" in shown
    assert ("lost most of its ability; try --sparsity 0.3 or --preset best" in shown) == (dense_value < 2)
    examples = PruningReport.load(tmp_path / "sparse").answers["examples"]
    assert [one["prompt"] for one in examples] == ["w1 w2 w3", "w4"] and examples[0]["dense"] in shown
    card = (tmp_path / "sparse" / "README.md").read_text()
    assert "KL divergence" in card and examples[0]["sparse"] in card


def test_streaming_gives_the_same_model(run, dense, tmp_path):
    for name, flags in (("whole", ()), ("streamed", ("--stream", "--device", "cpu"))):
        given = ("--sparsity", 0.7, "--dataset", tmp_path / "text.txt", *TUNED, *flags)
        run("prune", "--model", dense, "--output", tmp_path / name, *given)
    assert equal(tmp_path / "whole", tmp_path / "streamed")
    assert not list(tmp_path.glob(".*")), "the folder for rewritten weights is gone"


def test_the_packed_format_is_saved_and_pushed(run, dense, tmp_path, monkeypatch):
    output, text, published = tmp_path / "packed", tmp_path / "text.txt", []
    monkeypatch.setattr("optimum_neuronal.cli.prune_command.check_push", lambda *_, **__: None)
    push = "optimum_neuronal.cli.command.push_pruned"
    monkeypatch.setattr(push, lambda *_, format, **more: published.append(format))
    given = ("--model", dense, "--sparsity", 0.7, *PLAIN, "--push-to-hub", "me/sparse")
    shown = run("prune", *given, "--format", "packed", "--output", output)
    assert published == ["packed"] and not (output / "model.safetensors").exists()
    assert "import optimum_neuronal" in shown and "Perplexity was not measured" in shown, "without calibration text"
    assert (output / "packed-00001-of-00001.safetensors").exists()
    few = ("--window", 16, "--max-windows", 3)
    assert "perplexity" in run("evaluate", "--model", output, "--dataset", text, *few)


def test_an_interrupted_prune_resumes(run, dense, tmp_path, monkeypatch, capsys):
    arguments = ["prune", "--model", dense, "--sparsity", 0.7, "--dataset", tmp_path / "text.txt", *TUNED]
    run(*arguments, "--output", tmp_path / "undisturbed")
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="130"):
        patch.setattr("optimum_neuronal.pruning.prune.apply_changes", Mock(side_effect=KeyboardInterrupt))
        run(*arguments, "--output", tmp_path / "sparse")
    assert re.search("interrupted: the same command resumes from here; .*delete .*unfinished", capsys.readouterr().err)
    assert (tmp_path / ".sparse.unfinished").exists() and not (tmp_path / "sparse").exists()
    run(*arguments, "--output", tmp_path / "sparse")
    assert equal(tmp_path / "undisturbed", tmp_path / "sparse")
    assert not (tmp_path / ".sparse.unfinished").exists()


@pytest.mark.parametrize(
    ("flags", "in_file", "methods"),
    [
        ((), {}, ("wanda", {}, "neuronal", {"variant": "authors"})),
        (("--saliency", "ria:power=1.0"), {}, ("ria", {"power": 1.0}, "neuronal", {"variant": "authors"})),
        (("--topup", "owl:variant=corrected"), {}, ("wanda", {}, "owl", {"variant": "corrected"})),
        ((), {"topup": "owl:half_width=0.1"}, ("wanda", {}, "owl", {"variant": "authors", "half_width": 0.1})),
        (("--topup", "owl:half_width=0.2"), {"topup": "owl", "topup_args": {"outlier_factor": 7}}, ("wanda", {}, "owl", {"variant": "authors", "outlier_factor": 7, "half_width": 0.2})),
    ],
)  # fmt: skip
def test_flags_override_the_file_and_the_file_the_preset(flags, in_file, methods, tmp_path):
    """A method that stays keeps its hyperparameters. Another one has the paper's variant, if there is one."""
    (tmp_path / "own.json").write_text(json.dumps(in_file))
    words = ["prune", "--model", "x", "--sparsity", "0.5", "--preset", "paper", "--config", str(tmp_path / "own.json")]
    config = PruneCommand(make_parsers()["neuronal"].parse_args([*words, *flags])).config()
    assert (config.saliency, config.saliency_args, config.topup, config.topup_args) == methods
    assert config.sparsity == 0.5 and config.dataset == "c4"


def test_a_dry_run_writes_nothing_and_refuses_the_test_sets_that_a_prune_refuses(run, dense, tmp_path):
    (tmp_path / "short.txt").write_text("w1 w2 w3")
    before, given = sorted(tmp_path.iterdir()), ("prune", "--model", dense, "--sparsity", 0.7, *PLAIN)
    shown = run(*given, "--dry-run")
    assert "magnitude + uniform" in shown and "70.00%" in shown and sorted(tmp_path.iterdir()) == before
    for last in (("--dry-run",), ("--output", tmp_path / "sparse")):
        with pytest.raises(SystemExit, match="holds 3 tokens, fewer than one window of 16"):
            run(*given, "--evaluate", tmp_path / "short.txt", "--window", 16, *last)


def test_a_model_is_replaced_only_on_request(run, dense, tmp_path):
    given = ("prune", "--model", dense, *PLAIN, "--output", tmp_path / "sparse", "--sparsity")
    run(*given, 0.5)
    with pytest.raises(SystemExit, match=r"holds \d files of a model: .*--overwrite"):
        run(*given, 0.7)
    run(*given, 0.7, "--overwrite")
    assert "70.00%, 69.9" in run("inspect", tmp_path / "sparse")


def test_conversations(run, dense, tmp_path, monkeypatch):
    """A dry run, a pruning run and an evaluation render them. Without a chat template, an error says so before the work.

    Text in another file makes up a quarter of the calibration sequences.
    """
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    words = [f"w{20 + 2 * i} w{21 + 2 * i}" for i in range(60)]
    chat = [{"messages": [{"role": role, "content": own} for role in ("user", "assistant")]} for own in words]
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, chat)))
    data = ("--model", dense, "--dataset", tmp_path / "chat.jsonl")
    mixed = (f"{data[-1]}:0.75", f"{tmp_path / 'text.txt'}:.25")
    prune = ("prune", *data[:-1], *mixed, "--sparsity", 0.5, *WANDA)
    said = r"chat.jsonl\) holds conversations, but the tokenizer of dense has no chat template"
    for command in ((*prune, "--output", tmp_path / "sparse"), ("evaluate", *data), ("compare", *data)):
        with monkeypatch.context() as patch, pytest.raises(SystemExit, match=said):
            patch.setattr(cli_flags, "load_model", lambda *_: pytest.fail("the model was loaded"))
            run(*command)
    with pytest.raises(SystemExit, match="chat.jsonl:0.75, c4:0.5 do not sum to 1"):
        run("prune", *data[:-1], mixed[0], "c4:0.5", "--sparsity", 0.5, *WANDA, "--output", tmp_path / "sparse")
    tokenizer = AutoTokenizer.from_pretrained(dense)
    tokenizer.chat_template = "{% for message in messages %}{{ 'w1 ' + message.content + ' ' }}{% endfor %}"
    tokenizer.save_pretrained(dense)
    assert "dry run" in run(*prune, "--evaluate", tmp_path / "chat.jsonl", "--dry-run")
    run(*prune, "--output", tmp_path / "sparse")
    report = json.loads((tmp_path / "sparse" / "neuronal_report.json").read_text())
    assert report["calibration"]["source"] == "chat.jsonl (75%) and text.txt (25%)"
    shares = {"chat.jsonl (75%)": 0.75, "text.txt (25%)": 0.25}
    tokens = report["calibration"]["num_samples"] * report["calibration"]["seq_length"]
    assert report["calibration"]["dataset_tokens"] == {name: share * tokens for name, share in shares.items()}
    assert report["config"]["dataset"] == ["chat.jsonl:0.75", "text.txt:.25"]
    assert "--dataset path/to/chat.jsonl:0.75 path/to/text.txt:.25" in (tmp_path / "sparse" / "README.md").read_text()
    shown = run("evaluate", *data, "--window", 16).splitlines()[-1].split()
    assert shown[2:4] == [str(60 * 6 // 16), "16"]


def test_torchrun(run, dense, tmp_path):
    """The command, started as its users start it, saves what one process saves."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    text = ("--dataset", tmp_path / "text.txt", *SMALL)
    given = ("prune", "--model", dense, "--sparsity", 0.7, *text, "--preset", "fast", "--device", "cpu")
    assert run(*given, "--output", tmp_path / "one").count("Saved to") == 1
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={port}"]
    words = ["--no-python", Path(sys.executable).with_name("optimum-cli"), "neuronal", *given]
    command = [*launch, *map(str, words), "--output", str(tmp_path / "two")]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0 and result.stdout.count("Saved to") == 1, result.stderr
    assert equal(tmp_path / "one", tmp_path / "two")
    assert not list(tmp_path.glob(".*")), "the record of the unfinished prune is gone"
