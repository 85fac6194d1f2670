"""Every example and notebook runs as it is written, on something small."""

import ast
import hashlib
import importlib.util
import json
import re
import runpy
import sys
import sysconfig
from pathlib import Path

import datasets
import pytest
from conftest import make_tokenizer
from kinds import make_kind
from sparse import same_zeros, zeros_of
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from optimum_neuronal import NeuronALConfig, NeuronALPruner, evaluate_perplexity, inspect_checkpoint
from optimum_neuronal.demo.run import TINY_MODEL, load_tiny_model


EXAMPLES = Path(__file__).parent.parent / "examples"
TASKS = Path(__file__).parent / "fixtures" / "tasks"


def run(name, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    return runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def prepare(folder, characters):
    """Save two blocks of the tiny model in `folder / "dense"`. Return arguments that calibrate and evaluate a little."""
    model, tokenizer = load_tiny_model()
    model.model.layers = model.model.layers[:2]
    model.config.num_hidden_layers = 2
    model.config.max_position_embeddings = 64  # short sequences
    model.save_pretrained(folder / "dense")
    tokenizer.save_pretrained(folder / "dense")
    text = folder / "text.txt"
    text.write_text((TINY_MODEL / "heldout.txt").read_text()[:characters])
    return ("--dataset", TINY_MODEL / "calibration.txt", "--evaluate", text, "--num-samples", 8)


def test_train_tiny_model(tmp_path, monkeypatch):
    library, output = tmp_path / "library", tmp_path / "model"
    library.mkdir()
    parts = set()
    for index in range(40):
        name = f"module_{index}.py"
        parts.add(hashlib.sha256(name.encode()).digest()[0] % 25)
        lines = [f"def function_{index}_{line}(a, b):\n    return a + {line} * b\n" for line in range(60)]
        (library / name).write_text("\n".join(lines))
    assert {0, 1} < parts, "all three parts of the text are there"
    monkeypatch.setattr(sysconfig, "get_paths", lambda *_: {"stdlib": str(library)})
    run("train_tiny_model.py", monkeypatch, "--output", output, "--steps", 1, "--model-type", "opt")
    assert AutoModelForCausalLM.from_pretrained(output).config.num_hidden_layers == 8
    calibration, heldout = ((output / f"{part}.txt").read_text() for part in ("calibration", "heldout"))
    assert calibration and heldout and not set(calibration.split("\n\n")) & set(heldout.split("\n\n")) - {""}


@pytest.mark.parametrize(
    ("name", "flags", "printed"),
    [
        ("prune.py", (), ("dense: perplexity", "sparse, reloaded: perplexity", "chose lambda")),
        ("compare.py", ("--sparsity", 0.7), ("At 70%", "loses least")),
    ],
)
def test_pruning(tmp_path, monkeypatch, capsys, name, flags, printed):
    arguments = prepare(tmp_path, 6_000)
    run(name, monkeypatch, "--model", tmp_path / "dense", "--output", tmp_path / "out", *flags, *arguments)
    shown = capsys.readouterr().out
    assert all(text in shown for text in printed) and list((tmp_path / "out").iterdir())


@pytest.fixture
def text(tmp_path):
    for name, source, length in (("train.txt", "calibration.txt", 30_000), ("test.txt", "heldout.txt", 3_000)):
        (tmp_path / name).write_text((TINY_MODEL / source).read_text()[:length])
    return ("--train", tmp_path / "train.txt", "--evaluate", tmp_path / "test.txt", "--steps", 2, "--length", 32)


@pytest.fixture
def zeros(tmp_path):
    """Save a sparse model in `tmp_path / "sparse"`, its dense one in `tmp_path / "dense"`, and return its zeros."""
    prepare(tmp_path, 0)
    pruner = NeuronALPruner(NeuronALConfig(0.7, saliency="magnitude", topup="uniform"), tmp_path / "dense")
    model = pruner.prune(AutoModelForCausalLM.from_pretrained(tmp_path / "dense"))
    pruner.save(model, tmp_path / "sparse")
    return zeros_of(model)


def test_distill(tmp_path, monkeypatch, capsys, text, zeros):
    folders = ("--model", tmp_path / "sparse", "--teacher", tmp_path / "dense", "--output", tmp_path / "tuned")
    run("distill.py", monkeypatch, *folders, *text, "--steps", 10, "--prompts", "def", "class")
    shown = capsys.readouterr().out
    before, after = re.search(r"test.txt, .* ([\d.]+) \(before\), ([\d.]+) \(after\)", shown).groups()
    assert "2 answers of the dense model" in shown and "class\n  dense: " in shown
    tuned = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned", dtype="float32")
    assert float(after) < float(before) and same_zeros(tuned, zeros)
    perplexity = evaluate_perplexity(tuned, AutoTokenizer.from_pretrained(tmp_path / "tuned"), tmp_path / "test.txt")
    assert perplexity == pytest.approx(float(after), rel=1e-3)


RETRAINING = ["finetune.py", "finetune_lora.py", "finetune_lora.py --packed"]
RETRAINING += ["finetune_trl.py", "finetune_trl.py --lora"] if importlib.util.find_spec("trl") else []


@pytest.mark.parametrize("command", RETRAINING)
def test_retraining(tmp_path, monkeypatch, capsys, text, zeros, command):
    name, *flags = command.split()
    if name == "finetune_trl.py":
        lines = [json.dumps({"text": line}) for line in text[1].read_text().split("\n\n")]
        (tmp_path / "train.jsonl").write_text("\n".join(lines))
        text = ("--train", tmp_path / "train.jsonl", *text[2:])
    run(name, monkeypatch, "--model", tmp_path / "sparse", "--output", tmp_path / "tuned", *text, *flags)
    printed = capsys.readouterr().out
    before, after = (float(printed.partition(f"{when}: perplexity ")[2].split()[0]) for when in ("before", "after"))
    assert after < before
    tuned = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned", dtype="float32")
    assert same_zeros(tuned, zeros) and tuned.config.use_cache and not (tmp_path / "tuned" / "checkpoints").exists()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tuned")
    last = float(printed.rpartition("perplexity ")[2].split()[0])
    assert last == pytest.approx(evaluate_perplexity(tuned, tokenizer, tmp_path / "test.txt", 32), rel=1e-5)


def test_a_multimodal_gemma_is_tuned_on_windows_that_begin_with_bos(tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text(" ".join(f"w{(i * 7) % 60}" for i in range(2000)))
    pruner = NeuronALPruner(NeuronALConfig(0.7, "magnitude", topup="uniform"))
    pruner.save(pruner.prune(make_kind("Gemma3ForConditionalGeneration")), tmp_path / "sparse")
    make_tokenizer(bos_token="w9").save_pretrained(tmp_path / "sparse")
    text = ("--train", tmp_path / "text.txt", "--evaluate", tmp_path / "text.txt", "--steps", 2, "--length", 32)
    found = run("finetune.py", monkeypatch, "--model", tmp_path / "sparse", "--output", tmp_path / "tuned", *text)
    assert found["windows"].shape[1] == 32 and set(found["windows"][:, 0].tolist()) == {9}
    assert inspect_checkpoint(tmp_path / "tuned").verdict == "Verified: the zeros agree with the sparsity_config."
    assert AutoModelForImageTextToText.from_pretrained(tmp_path / "tuned").config.model_type == "gemma3"


def test_export_gguf_checks_its_paths_first(tmp_path, monkeypatch, capsys):
    pytest.importorskip("gguf")
    places = ("--model", tmp_path, "--llama-cpp", tmp_path / "gone", "--text", EXAMPLES / "prune.py")
    with pytest.raises(SystemExit):
        run("export_gguf.py", monkeypatch, *places, "--output", tmp_path / "out")
    assert "gone/convert_hf_to_gguf.py does not exist" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_gradual_pruning(tmp_path, monkeypatch, text):
    prepare(tmp_path, 0)
    arguments = ("--topup", "uniform", "--num-samples", 8, *text[:-3], 5, *text[-2:])
    run("gradual_pruning.py", monkeypatch, "--model", tmp_path / "dense", "--output", tmp_path / "tuned", *arguments)
    tuned = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned")
    assert tuned.config.sparsity_config["sparsity"] == 0.7


NOTEBOOKS = {path.name: json.loads(path.read_text(encoding="utf-8")) for path in EXAMPLES.glob("*.ipynb")}


def run_notebook(name, **parameters):
    """Run the code cells with other parameters, and return their namespace."""
    namespace = {"__name__": "__main__"}
    for cell in NOTEBOOKS[name]["cells"]:
        if cell["cell_type"] != "code":
            continue
        assert cell["outputs"] == [] and cell["execution_count"] is None
        exec(compile(ast.parse("".join(cell["source"])), name, "exec"), namespace)
        if "parameters" in cell["metadata"].get("tags", ()):
            assert parameters.keys() <= namespace.keys()
            namespace.update(parameters)
    return namespace


def small(folder):
    *_, test, _, _ = prepare(folder, 6_000)
    calibration = str(TINY_MODEL / "calibration.txt")
    sizes = {"CALIBRATION": calibration, "SAMPLES": 8, "LENGTH": 32, "TEST": str(test), "WINDOWS": 4}
    return {"MODEL": f"{folder}/dense", **sizes, "OUTPUT": f"{folder}/small"}


def test_prune_with_neuronal(tmp_path, monkeypatch):
    pytest.importorskip("lm_eval")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path))
    monkeypatch.chdir(TASKS)  # the task's file is named relative to it
    own = {"TASKS": ["neuronal_words"], "QUESTIONS": 2, "TASK_FILES": TASKS, "STEPS": 2}
    text = str(TINY_MODEL / "heldout.txt")
    found = run_notebook("prune_with_neuronal.ipynb", TRAIN=text, **own, **small(tmp_path))
    assert set(found["pruner"].report.decisions) == {"block", "row"}
    assert [len(found["comparison"].results), len(found["comparison"].failed)] == [3, 0]
    assert found["tuned"] < found["pruned"] and found["zeros"] == pytest.approx(0.5, abs=5e-3)  # whole weights per row
    assert found["answers"].prompts == len(found["PROMPTS"]) and found["answers"].kl > 0
    assert (tmp_path / "small" / "README.md").exists() and (tmp_path / "small-tuned" / "model.safetensors").exists()


def test_run_on_a_laptop(tmp_path):
    options = small(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(options["MODEL"])
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer.save_pretrained(options["MODEL"])
    found = run_notebook("run_on_a_laptop.ipynb", TOKENS=2, ROUNDS=1, MINUTES=0.05, **options)
    assert found["packed"].packing.packed == 14 and found["weights"] > 0
    assert found["answers"].compare(found["packed"]).kl > 0, "the dense model's answer was kept"
    measured = found["report"].training[0]["held_out"]  # the notebook's own text is too little for a second's training
    assert measured["after"] < measured["before"]
