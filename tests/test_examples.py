"""Every example runs as it is written, on something small."""

import hashlib
import runpy
import sys
import sysconfig
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from optimum_neuronal.demo import TINY_MODEL, load_tiny_model


EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def test_examples_are_short():
    for example in EXAMPLES.glob("*.py"):
        assert len(example.read_text().splitlines()) <= 60, example.name


@pytest.mark.parametrize("model_type", ["mistral", "opt"])
def test_train_tiny_model(tmp_path, monkeypatch, model_type):
    """One step, on a library of forty files."""
    library, output = tmp_path / "library", tmp_path / "model"
    library.mkdir()
    parts = set()
    for index in range(40):
        name = f"module_{index}.py"
        parts.add(hashlib.sha256(name.encode()).digest()[0] % 25)
        lines = [f"def function_{index}_{line}(a, b):\n    return a + {line} * b\n" for line in range(60)]
        (library / name).write_text("\n".join(lines))
    assert {0, 1} < parts, "all three parts are there"
    monkeypatch.setattr(sysconfig, "get_paths", lambda *_: {"stdlib": str(library)})
    run("train_tiny_model.py", monkeypatch, "--output", output, "--steps", 1, "--model-type", model_type)
    model = AutoModelForCausalLM.from_pretrained(output)
    assert model.config.model_type == model_type and model.config.num_hidden_layers == 8
    calibration, heldout = ((output / f"{part}.txt").read_text() for part in ("calibration", "heldout"))
    assert calibration and heldout and not set(calibration.split("\n\n")) & set(heldout.split("\n\n")) - {""}
    assert AutoTokenizer.from_pretrained(output)(heldout)["input_ids"]


def test_prune(tmp_path, monkeypatch, capsys):
    model, tokenizer = load_tiny_model()
    model.save_pretrained(tmp_path / "dense")
    tokenizer.save_pretrained(tmp_path / "dense")
    text = tmp_path / "text.txt"
    text.write_text((TINY_MODEL / "heldout.txt").read_text()[:10_000])
    arguments = ("--dataset", TINY_MODEL / "calibration.txt", "--evaluate", text, "--num-samples", 8)
    run("prune.py", monkeypatch, "--model", tmp_path / "dense", "--output", tmp_path / "sparse", *arguments)
    printed = capsys.readouterr().out
    assert "dense: perplexity" in printed and "sparse, reloaded: perplexity" in printed and "70.0" in printed


def test_compare(tmp_path, monkeypatch, capsys):
    model, tokenizer = load_tiny_model()
    model.save_pretrained(tmp_path / "dense")
    tokenizer.save_pretrained(tmp_path / "dense")
    text = tmp_path / "text.txt"
    text.write_text((TINY_MODEL / "heldout.txt").read_text()[:6_000])
    arguments = ("--dataset", TINY_MODEL / "calibration.txt", "--evaluate", text, "--num-samples", 8)
    run(
        "compare.py",
        monkeypatch,
        "--model",
        tmp_path / "dense",
        "--output",
        tmp_path / "out",
        "--sparsity",
        0.7,
        *arguments,
    )
    printed = capsys.readouterr().out
    assert "At 70%" in printed and "loses least" in printed and "perplexity x dense, 70%" in printed
    assert (tmp_path / "out" / "comparison.md").exists()
