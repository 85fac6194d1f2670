"""Every example runs as it is written, on something small."""

import ast
import hashlib
import importlib.util
import json
import runpy
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch
from sparse import same_zeros, zeros_of
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from optimum_neuronal import NeuronALConfig, NeuronALPruner
from optimum_neuronal.config.config_fields import EFFORTS
from optimum_neuronal.demo.run import TINY_MODEL, load_tiny_model


EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def test_examples_are_short():
    for example in EXAMPLES.glob("*.py"):
        assert len(example.read_text().splitlines()) <= 80, example.name


@pytest.mark.parametrize("model_type", ["mistral", "opt"])
def test_train_tiny_model(tmp_path, monkeypatch, model_type):
    """One step, on a library of forty files; then another one, at which a copy is kept."""
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
    keep = 1.5 * 8 * 256 / model.num_parameters()  # tokens per parameter, within the second step
    arguments = ("--output", output, "--model-type", model_type, "--keep", keep, 100)
    run("train_tiny_model.py", monkeypatch, *arguments, "--steps", 2)
    state = json.loads((output / "training" / "checkpoint-2" / "trainer_state.json").read_text())
    assert state["global_step"] == 2 and not (output / "training" / "checkpoint-1").exists(), (
        "it went on from the first"
    )
    resumed, kept = (AutoModelForCausalLM.from_pretrained(each) for each in (output, output / f"kept-{keep:g}"))
    assert all(map(torch.equal, resumed.state_dict().values(), kept.state_dict().values()))
    assert len(list(output.glob("kept-*"))) == 1


def prepare(folder, characters):
    """Saves two blocks of the tiny model in `folder / "dense"`; arguments that calibrate and evaluate a little."""
    model, tokenizer = load_tiny_model()
    model.model.layers = model.model.layers[:2]
    model.config.num_hidden_layers = 2
    model.config.max_position_embeddings = 64  # short sequences
    model.save_pretrained(folder / "dense")
    tokenizer.save_pretrained(folder / "dense")
    text = folder / "text.txt"
    text.write_text((TINY_MODEL / "heldout.txt").read_text()[:characters])
    return ("--dataset", TINY_MODEL / "calibration.txt", "--evaluate", text, "--num-samples", 8)


def test_prune(tmp_path, monkeypatch, capsys):
    for effort in EFFORTS.values():  # the default search takes most of the time
        monkeypatch.setitem(effort, "topup", "uniform")
    arguments = prepare(tmp_path, 6_000)
    run("prune.py", monkeypatch, "--model", tmp_path / "dense", "--output", tmp_path / "sparse", *arguments)
    printed = capsys.readouterr().out
    assert "dense: perplexity" in printed and "sparse, reloaded: perplexity" in printed and "70.0" in printed


def test_compare(tmp_path, monkeypatch, capsys):
    arguments = prepare(tmp_path, 6_000)
    folders = ("--model", tmp_path / "dense", "--output", tmp_path / "out")
    run("compare.py", monkeypatch, *folders, "--sparsity", 0.7, *arguments)
    printed = capsys.readouterr().out
    assert "At 70%" in printed and "loses least" in printed and "perplexity x dense, 70%" in printed
    assert (tmp_path / "out" / "comparison.md").exists()


@pytest.fixture
def text(tmp_path):
    """Training text, of which a piece is test text too: only that the examples run is tested."""
    for name, source, length in (("train.txt", "calibration.txt", 30_000), ("test.txt", "heldout.txt", 3_000)):
        (tmp_path / name).write_text((TINY_MODEL / source).read_text()[:length])
    return ("--train", tmp_path / "train.txt", "--evaluate", tmp_path / "test.txt", "--steps", 2, "--length", 32)


@dataclass
class SFTConfig(TrainingArguments):
    """Stands in for TRL's, with the fields that the example sets."""

    max_length: int = 1024
    packing: bool = False
    packing_strategy: str = "bfd"


class SFTTrainer(Trainer):
    """Stands in for TRL's: it makes sequences of the texts itself."""

    def __init__(self, model, args, train_dataset, processing_class, callbacks):
        assert args.packing and args.packing_strategy == "wrapped"
        ids = processing_class("\n".join(train_dataset["text"]))["input_ids"]
        windows = zip(*[iter(ids)] * args.max_length)
        data = [{"input_ids": torch.tensor(window), "labels": torch.tensor(window)} for window in windows]
        super().__init__(model, args, train_dataset=data, callbacks=callbacks)


@pytest.fixture
def trl(monkeypatch):
    """TRL, or what stands in for it where it is not installed: no requirement of the tests brings it."""
    if importlib.util.find_spec("trl") is None:
        stand_in = ModuleType("trl")
        stand_in.SFTConfig, stand_in.SFTTrainer = SFTConfig, SFTTrainer
        monkeypatch.setitem(sys.modules, "trl", stand_in)


@pytest.mark.parametrize(
    "name, flags",
    [
        ("finetune.py", ()),
        ("finetune_lora.py", ()),
        ("finetune_lora.py", ("--packed",)),
        ("finetune_trl.py", ()),
        ("finetune_trl.py", ("--lora",)),
        ("finetune_trl.py", ("--packed",)),
        ("distill.py", ()),
    ],
)
def test_retraining(tmp_path, monkeypatch, capsys, text, trl, name, flags):
    prepare(tmp_path, 0)
    if name == "finetune_trl.py":
        lines = [json.dumps({"text": line}) for line in text[1].read_text().split("\n\n")]
        (tmp_path / "train.jsonl").write_text("\n".join(lines))
        text = ("--train", tmp_path / "train.jsonl", *text[2:])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
    NeuronALPruner(NeuronALConfig(0.7, saliency="magnitude", topup="uniform")).prune(model)
    zeros = zeros_of(model)
    model.save_pretrained(tmp_path / "sparse")
    AutoTokenizer.from_pretrained(tmp_path / "dense").save_pretrained(tmp_path / "sparse")
    teacher = ("--teacher", tmp_path / "dense") if name == "distill.py" else ()
    run(name, monkeypatch, "--model", tmp_path / "sparse", "--output", tmp_path / "tuned", *teacher, *text, *flags)
    printed = capsys.readouterr().out
    before, after = (float(printed.partition(f"{when}: perplexity ")[2].split()[0]) for when in ("before", "after"))
    assert after < before
    if (name, flags) == ("finetune_trl.py", ("--packed",)):  # an adapter alone
        assert (tmp_path / "tuned" / "adapter_config.json").exists()
        return
    assert same_zeros(AutoModelForCausalLM.from_pretrained(tmp_path / "tuned", dtype="float32"), zeros)


def test_gradual_pruning(tmp_path, monkeypatch, capsys, text):
    prepare(tmp_path, 0)
    arguments = ("--topup", "uniform", "--num-samples", 8, *text[:-3], 5, *text[-2:])
    run("gradual_pruning.py", monkeypatch, "--model", tmp_path / "dense", "--output", tmp_path / "tuned", *arguments)
    assert "70.0% sparse: perplexity" in capsys.readouterr().out
    tuned = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned")
    assert tuned.config.sparsity_config["sparsity"] == 0.7


NOTEBOOKS = {path.name: json.loads(path.read_text(encoding="utf-8")) for path in EXAMPLES.glob("*.ipynb")}


def run_notebook(name, **parameters):
    """Runs the code cells as a notebook would, with other parameters, and returns their namespace."""
    namespace = {"__name__": "__main__"}
    for cell in NOTEBOOKS[name]["cells"]:
        if cell["cell_type"] != "code":
            continue
        program = ast.parse("".join(cell["source"]))
        shown = program.body.pop() if isinstance(program.body[-1], ast.Expr) else None
        exec(compile(program, name, "exec"), namespace)
        if shown is not None:
            shown = eval(compile(ast.Expression(shown.value), name, "eval"), namespace)
            getattr(shown, "_repr_html_", shown.__repr__)()
        if "parameters" in cell["metadata"].get("tags", ()):
            assert parameters.keys() <= namespace.keys()
            namespace.update(parameters)
    return namespace


def small(folder):
    """Two blocks of the tiny model, little text, and where a notebook saves."""
    *_, test, _, _ = prepare(folder, 6_000)
    return {"MODEL": f"{folder}/dense", "TEST": str(test), "WINDOWS": 4, "LENGTH": 32, "OUTPUT": f"{folder}/sparse"}


def test_notebooks_hold_no_output():
    for notebook in NOTEBOOKS.values():
        for cell in notebook["cells"]:
            assert cell["cell_type"] == "markdown" or (cell["outputs"] == [] and cell["execution_count"] is None)


def test_prune_and_compare(tmp_path, capsys):
    little = {"SAMPLES": 8, "TOPUPS": ["uniform", "owl"], "EFFORT": "fast"}
    found = run_notebook("prune_and_compare.ipynb", **little, **small(tmp_path))
    assert [len(found["comparison"].results), len(found["comparison"].failed)] == [4, 0]
    assert found["pruner"].report.achieved_sparsity == pytest.approx(0.7, abs=1e-3)
    assert "dense," in capsys.readouterr().out
    assert same_zeros(found["reloaded"], zeros_of(found["model"]))


def test_run_faster_and_fine_tune(tmp_path, capsys):
    found = run_notebook("run_faster_and_fine_tune.ipynb", STEPS=2, WIDTH=256, **small(tmp_path))
    assert found["tuned"] < found["pruned"]
    assert found["zeros"] == pytest.approx(0.7, abs=1e-3)
    printed = capsys.readouterr().out
    assert "tokens per second dense" in printed and "70% zeros" in printed
    assert found["packed"].packing.packed == 7 and found["wide"].lm_head.weight.dtype == torch.bfloat16
    assert (tmp_path / "sparse" / "tokenizer.json").exists() and found["model"].packing is not None
