"""The examples that export run as they are written; what they export with is no requirement of the tests, and has stand-ins."""

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from llama_cpp_programs import write_program
from safetensors.torch import load_file
from test_examples import prepare, run
from transformers import AutoModelForCausalLM, AutoTokenizer

from optimum_neuronal import NeuronALConfig, NeuronALPruner


@pytest.fixture
def sparse(tmp_path):
    """A sparse checkpoint with its tokenizer, in float32, and the number of its zeros."""
    prepare(tmp_path, 2_000)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "dense")
    pruner = NeuronALPruner(NeuronALConfig(0.7, saliency="magnitude", topup="uniform"), tokenizer)
    pruner.save(pruner.prune(model), tmp_path / "sparse", format="dense")
    return tmp_path / "sparse", sum(int((p == 0).sum()) for p in model.base_model.parameters())


def test_export_gguf(sparse, tmp_path, monkeypatch, capsys):
    """Perplexity is of the tokens that llama-perplexity scores: the third of each three."""
    folder, zeros = sparse
    programs = tmp_path / "llama.cpp" / "build" / "bin"
    programs.mkdir(parents=True)
    copy = "import shutil, sys; shutil.copy(sys.argv[1] + '/model.safetensors', sys.argv[5])"
    (tmp_path / "llama.cpp" / "convert_hf_to_gguf.py").write_text(copy)
    write_program(programs, "llama-perplexity", "", error="Final estimate: PPL = 12.5000 +/- 0.25")
    write_program(programs, "llama-quantize", "")
    (programs / "llama-quantize").write_text('#!/bin/sh\ncp "$1" "$2"\n')
    monkeypatch.setitem(sys.modules, "gguf", ModuleType("gguf"))
    sys.modules["gguf"].GGUFReader = lambda path: SimpleNamespace(
        tensors=[SimpleNamespace(name=name, data=value.numpy()) for name, value in load_file(path).items()]
    )
    arguments = ("--text", tmp_path / "text.txt", "--output", tmp_path / "out", "--types", "Q4_0", "--length", 3)
    run("export_gguf.py", monkeypatch, "--model", folder, "--llama-cpp", tmp_path / "llama.cpp", *arguments)
    printed = capsys.readouterr().out
    assert f"zeros in matrices: {zeros:,} in the checkpoint, {zeros:,} in" in printed
    assert "F32: " in printed and "Q4_0: " in printed and printed.count("perplexity 12.5000") == 2
    ids = AutoTokenizer.from_pretrained(folder)((tmp_path / "text.txt").read_text(), return_tensors="pt").input_ids[0]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        windows = ids[: len(ids) // 3 * 3].view(-1, 3)
        losses = model(windows).logits[:, 1].log_softmax(-1).gather(1, windows[:, 2:])
    assert float(printed.partition("transformers: perplexity ")[2].split()[0]) == pytest.approx(
        torch.exp(-losses.mean()).item(), rel=1e-4
    )


class Exported:
    """Stands in for a model of optimum: computes with torch, and saves the weights under the name of ONNX's file."""

    def __init__(self, path, **options):
        self.model, self.options = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), options

    from_pretrained = classmethod(lambda cls, path, **options: cls(path, **options))

    def save_pretrained(self, folder):
        assert self.options.pop("export") and not self.options.pop("load_in_8bit", False) and not self.options
        self.model.save_pretrained(folder)
        (folder / "model.safetensors").rename(folder / "model.onnx")

    def __call__(self, **inputs):
        return SimpleNamespace(logits=self.model(**inputs).logits.detach().numpy() + np.float32(0.5))


def load(path):
    """Stands in for `onnx.load`, which gives a graph."""
    weights = [SimpleNamespace(dims=value.shape, value=value.numpy()) for value in load_file(path).values()]
    return SimpleNamespace(graph=SimpleNamespace(initializer=weights))


def read_model(path):
    """Stands in for OpenVINO's reader, which gives nodes."""
    node = {"get_type_name": lambda self: "Constant", "get_output_shape": lambda self, _: self.data.shape}
    weights = load_file(path.with_name("model.onnx")).values()
    return SimpleNamespace(get_ops=lambda: [type("Node", (), {**node, "data": value.numpy()})() for value in weights])


@pytest.mark.parametrize("to", ["onnx", "openvino"])
def test_export_optimum(sparse, tmp_path, monkeypatch, capsys, to):
    folder, zeros = sparse
    for name, content in {
        "optimum.onnxruntime": {"ORTModelForCausalLM": Exported},
        "optimum.intel": {"OVModelForCausalLM": Exported},
        "onnx": {"load": load, "numpy_helper": SimpleNamespace(to_array=lambda tensor: tensor.value)},
        "openvino": {"Core": lambda: SimpleNamespace(read_model=read_model)},
    }.items():
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        vars(sys.modules[name]).update(content)
    run("export_optimum.py", monkeypatch, "--model", folder, "--to", to, "--output", tmp_path / "out")
    printed = capsys.readouterr().out
    assert "differ by at most 5.0e-01" in printed
    assert f"zeros in matrices: {zeros:,} in the checkpoint, {zeros:,} in" in printed
