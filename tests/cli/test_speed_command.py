import json
import os
import re
import sys

import pytest
from llama_cpp_programs import flags_of, write_programs
from packed_models import make_zeroed, pack

import optimum_neuronal
from optimum_neuronal import SparseModelForCausalLM, sparsify
from optimum_neuronal.evaluation import quantized
from optimum_neuronal.packed.packed_module import packed_modules


@pytest.fixture
def sparse(tmp_path):
    make_zeroed("llama").save_pretrained(tmp_path / "sparse")
    return tmp_path / "sparse"


FEW = ("--batches", 1, 2, "--prompt-tokens", 8, "--new-tokens", 2, "--rounds", 1)


def test_a_table_and_a_figure(run, sparse, tmp_path):
    printed = run("speed", "--model", sparse, *FEW, "--plots", tmp_path / "figure")
    for part in ("decode, batch 1", "decode, batch 2", "prefill, 8 tokens", "memory", "Packed weights are"):
        assert part in printed
    assert (tmp_path / "figure.png").exists() and (tmp_path / "figure.svg").exists()


def test_few_bits(run, sparse, tmp_path):
    assert "4 bits" in run("speed", "--model", sparse, *FEW, "--bits", 4, "--plots", tmp_path / "figure")
    assert "3 bits, 8-bit head" in run("speed", "--model", sparse, *FEW, "--bits", 3, "--embedding-bits", 8)
    assert (tmp_path / "figure.png").exists()


def test_a_quantised_checkpoint_is_timed_dense_too(run, tmp_path):
    pack(make_zeroed("llama"), bits=4).save_pretrained(tmp_path / "quantised")
    found = json.loads(run("speed", "--model", tmp_path / "quantised", *FEW, "--bits", 2, "--no-torchao", "--json"))
    assert found["packed_bytes"] < 0.7 * found["dense_bytes"]


def test_without_torchao_a_line_says_how_it_is_had(run, sparse, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    line = "Not shown: torchao int8 and torchao int4: pip install torchao."
    assert run("speed", "--model", sparse, *FEW).splitlines()[-1] == line
    assert line not in run("speed", "--model", sparse, *FEW, "--no-torchao")


def test_torchao_beside(run, sparse, monkeypatch):
    """What it quantises is what is packed; what it cannot do is told."""
    asked = []

    def quantize(model, names, form):
        asked.append((form, set(names)))
        if form == "torchao int4":
            raise quantized.NotQuantized("no kernels")
        return model

    monkeypatch.setattr(quantized, "has_torchao", lambda: True)
    monkeypatch.setattr(quantized, "quantize", quantize)
    printed = run("speed", "--model", sparse, *FEW)
    assert len(re.findall("torchao int8 +times", printed)) == 2 and quantized.EAGER in printed
    assert "Not shown: torchao int4: no kernels." in printed
    packed = {name for name, _ in packed_modules(SparseModelForCausalLM.from_pretrained(sparse))}
    assert asked == [("torchao int8", packed), ("torchao int4", packed)]
    found = json.loads(run("speed", "--model", sparse, *FEW, "--json"))
    assert found["other_bytes"].keys() == {"torchao int8"} and found["left_out"] == {"torchao int4": "no kernels"}
    found = json.loads(run("speed", "--model", sparse, *FEW, "--no-torchao", "--json"))
    assert len(found["timings"]) == 3 and found["packed_bytes"] < found["dense_bytes"]
    if sys.platform == "linux":
        assert found["resident"].keys() == {"dense", "packed"}, "measured by the system"


def test_a_gguf_file_beside(run, sparse, tmp_path, monkeypatch):
    folder, file = write_programs(tmp_path / "programs"), tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    monkeypatch.setenv("PATH", os.pathsep.join([str(folder), os.environ["PATH"]]))
    flags = ("--model", sparse, *FEW, "--no-torchao", "--prompt-tokens", 9, "--new-tokens", 4, "--llama-cpp", file)
    *_, beside = run("speed", *flags).partition("llama 1B Q4_0 in llama.cpp 7 (abc)")
    for work, rate in (("decode, batch 1", "12.0"), ("decode, batch 2", "22.0"), ("prefill, 9 tokens", "90.0")):
        assert re.search(rf"{work} +[\d.]+ +{rate} ", beside), beside
    found = json.loads(run("speed", *flags, "--json"))["llama_cpp"]
    assert found["nbytes"] == 1000 and found["rates"]["decode, batch 2"] == 22.0
    assert flags_of(folder, "llama-bench")["-m"] == str(file)


def test_mistakes_are_found_before_loading(run, tmp_path):
    with pytest.raises(SystemExit, match="speed: error: The folder of --plots"):
        run("speed", "--model", tmp_path, "--plots", tmp_path / "none" / "figure")


def test_env_shows_what_computes_here(run):
    found = json.loads(run("env", "--json"))
    assert found["optimum_neuronal"] == optimum_neuronal.__version__ and found["threads"] >= 1
    assert found["kernel in use"].partition(":")[0] in ("torch", *found["kernels that run here"].split(", "))
    table = run("env")
    assert all(name in table for name in found) and found["processor"] in table
