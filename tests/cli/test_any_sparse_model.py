"""A model with zeros is a sparse model, no matter which tool pruned it. Formats that are not read are named."""

import os

import pytest
import torch
from conftest import make_model, make_tokenizer
from packed_models import make_zeroed
from safetensors.torch import load_file, save_file
from sparse_checkpoints import change_config
from torch.nn.utils import prune

from optimum_neuronal import save_pretrained
from optimum_neuronal.packed import sparsify


ANOTHER = {"format": "dense", "global_sparsity": 0.5}  # another tool's record
BITMASK = {"compressed": torch.float32, "bitmask": torch.uint8, "row_offsets": torch.int64}
MARLIN = {"weight_packed": torch.int32, "scale_packed": torch.float16, "meta": torch.int16}


def zeroed(folder, format="dense", **config):
    save_pretrained(make_zeroed("llama", 0.5, vocab_size=256), folder, format)
    change_config(folder, lambda own: own.pop("sparsity_config"))
    change_config(folder, lambda own: own.update(config))


def masked(folder, remove):
    """As `torch.nn.utils.prune` leaves a model, before or after its `remove`."""
    model = make_model("llama", vocab_size=256)
    for module in [module for name, module in model.named_modules() if name.endswith("_proj")]:
        prune.l1_unstructured(module, "weight", 0.5)
        if remove:
            prune.remove(module, "weight")
    model.save_pretrained(folder)


TRAINED = ("--steps", 4, "--batch-size", 4, "--learning-rate", 0.03)


@pytest.mark.parametrize(
    "make, negative",
    [
        (zeroed, False),
        (lambda folder: masked(folder, remove=True), True),
        (lambda folder: zeroed(folder, sparsity_config=ANOTHER, compression_config=ANOTHER), False),
        (lambda folder: zeroed(folder, "packed", sparsity_config=["sparse"]), False),
    ],
    ids=["zeros", "torch.nn.utils.prune", "llm-compressor", "packed"],
)
def test_the_whole_way(make, negative, run, dense, tmp_path, monkeypatch):
    lines, text = [], tmp_path / "text.txt"
    monkeypatch.setattr(sparsify.logger, "warning_once", lines.append)
    make(tmp_path / "sparse")
    make_tokenizer().save_pretrained(tmp_path / "sparse")
    model, short = ("--model", tmp_path / "sparse"), ("--seq-length", 16, "--dataset", text)
    assert "% zeros, not recorded how they were made: there is nothing to verify." in run("inspect", model[1])
    assert "text.txt" in run("evaluate", *model, "--dataset", text, "--window", 16, "--max-windows", 2)
    assert "packed is" in run("speed", *model, "--batches", 1, "--prompt-tokens", 8, "--new-tokens", 2, "--rounds", 1)
    assert any("-0.0" in line for line in lines) == negative
    run("finetune", *model, "--teacher", dense, *short, *TRAINED, "--output", tmp_path / "tuned")
    run("convert", tmp_path / "tuned", "--format", "packed", "--output", tmp_path / "converted")
    if not list((tmp_path / "sparse").glob("packed*")):
        run("convert", model[1], "--format", "packed", "--output", tmp_path / "converted", "--overwrite")
    for written in ("tuned", "converted"):
        shown = run("inspect", tmp_path / written)
        assert "unknown" in shown and "Verified: the zeros agree with the sparsity_config." in shown
    for command in ("prune", "compare"):
        given = (*model, "--sparsity", 0.3, *short, "--output", tmp_path / "again")
        with pytest.raises(SystemExit, match="is already sparse: .*Prune the dense model, or fine-tune this one"):
            run(command, *given, *(("--evaluate", text) if command == "compare" else ()))


def stored(folder, parts, **quantization_config):
    """Store the parts of another format, by their names and dtypes, in place of each projection."""
    zeroed(folder, quantization_config=quantization_config or None)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if "_proj" in name]:
        del tensors[name]
        tensors |= {name.replace("weight", part): torch.ones(4, 4, dtype=dtype) for part, dtype in parts.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def instead(folder, name, make=os.mknod):
    """Make another file in place of the weights."""
    zeroed(folder)
    (folder / "model.safetensors").unlink()
    make(folder / name)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda folder: masked(folder, remove=False), "_proj.weight_(mask|orig)', .* Call its remove"),
        (lambda folder: stored(folder, BITMASK), "_proj.bitmask', .* Save it dense"),
        (lambda folder: stored(folder, BITMASK, format="sparse-24-bitmask"), "'sparse-24-bitmask', .* Save it dense"),
        (lambda folder: stored(folder, BITMASK, sparsity_config={"format": "sparse-bitmask"}), "'sparse-bitmask', "),
        (lambda folder: stored(folder, MARLIN, format="marlin-24"), "'marlin-24', .* before it was quantized"),
        (lambda folder: stored(folder, {"qweight": torch.int32}, quant_method="gptq", bits=4), "quantized|missing"),
        (lambda folder: instead(folder, "model.onnx"), "'model.onnx', .* Use the PyTorch model"),
        (lambda folder: instead(folder, "final_model.pt"), "'final_model.pt', .* Load it with the code that wrote it"),
        (lambda folder: instead(folder, "model.safetensors", os.mkfifo), "model.safetensors is not a regular file"),
    ],
)
def test_what_is_not_read_is_named(make, message, run, dense, tmp_path):
    """By every command, and nothing in it is counted as weights."""
    make(tmp_path / "sparse")
    make_tokenizer().save_pretrained(tmp_path / "sparse")
    model, text = ("--model", tmp_path / "sparse"), ("--dataset", tmp_path / "text.txt")
    for given in (
        ("inspect", tmp_path / "sparse"),
        ("convert", tmp_path / "sparse", "--format", "packed"),
        ("evaluate", *model, *text),
        ("speed", *model),
        ("finetune", *model, "--kl-weight", 0, *text),
        ("prune", *model, "--sparsity", 0.5, *text),
        ("compare", *model, "--sparsity", 0.5, *text, "--evaluate", text[1]),
    ):
        output = () if given[0] in ("inspect", "evaluate", "speed") else ("--output", tmp_path / "new")
        with pytest.raises(SystemExit, match=message):
            run(*given, *output)
