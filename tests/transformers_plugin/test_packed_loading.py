"""Packed checkpoints through transformers' own `from_pretrained`."""

import copy
import os
import subprocess
import sys

import pytest
import torch
from packed_models import assert_same_state, make_zeroed
from profiles import by_day
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaForCausalLM

from optimum_neuronal import densify, save_pretrained, sparsify
from optimum_neuronal.packed.packed_module import PackedLinear, packed_modules


IDS = torch.arange(16)[None]


def assert_same(model, expected):
    assert_same_state(model, expected.state_dict())


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packed") / "llama"
    save_pretrained(make_zeroed("llama"), folder, format="packed")
    return folder


FAMILIES = [
    ("llama", {}), ("llama", {"tie_word_embeddings": True}), ("opt", {}), ("gpt2", {}), ("phi3", {}), ("qwen3_moe", {}),
    ("mixtral", {}), ("gpt_oss", {}),
]  # fmt: skip


@pytest.mark.parametrize("family, overrides", by_day(FAMILIES, *FAMILIES[1:4], *FAMILIES[5:]))
@pytest.mark.parametrize("size, device_map", [("1GB", None), (9_000, "auto")])
def test_what_sparsify_makes(family, overrides, size, device_map, tmp_path):
    model = make_zeroed(family, **overrides).bfloat16()
    save_pretrained(model, tmp_path, "packed", max_shard_size=size)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=device_map)
    expected = sparsify(copy.deepcopy(model))
    assert_same(loaded, expected)
    assert dict(packed_modules(loaded)).keys() == dict(packed_modules(expected)).keys() != set()
    assert_same(densify(loaded), model)


def test_another_dtype(packed):
    loaded = AutoModelForCausalLM.from_pretrained(packed, dtype=torch.bfloat16)
    assert loaded.dtype == torch.bfloat16
    assert_same(loaded, AutoModelForCausalLM.from_pretrained(packed).bfloat16())
    with pytest.raises(ValueError, match="float64"):
        AutoModelForCausalLM.from_pretrained(packed, dtype=torch.float64)


def test_without_the_head(packed, tmp_path):
    base, whole = AutoModel.from_pretrained(packed), AutoModelForCausalLM.from_pretrained(packed)
    assert_same(base, whole.model)
    save_pretrained(base, tmp_path, "packed")
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path).model, whole.model)


def test_with_another_head(tmp_path):
    """The checkpoint's, which is packed too, is left out, as from a dense checkpoint."""
    model = make_zeroed("llama")
    model.lm_head.weight.data[:, ::2] = 0
    sparsify(model)
    assert isinstance(model.lm_head, PackedLinear)
    save_pretrained(model, tmp_path, format="packed")
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
    assert loaded.score.weight.shape[0] == 3
    assert_same(loaded.model, model.model)


def test_it_is_a_plain_model_but_for_its_modules(packed, tmp_path):
    make_zeroed("llama").save_pretrained(tmp_path)
    loaded, plain = LlamaForCausalLM.from_pretrained(packed), LlamaForCausalLM.from_pretrained(tmp_path)
    assert vars(loaded).keys() - vars(plain).keys() == {"hf_quantizer", "packing"}
    assert vars(loaded.config).keys() - {"sparsity_config"} == vars(plain.config).keys()
    densify(loaded)
    assert vars(loaded).keys() ^ vars(plain).keys() == {"_weight_conversions"}  # of the names in its files
    loaded(IDS, labels=IDS).loss.backward()
    assert all(parameter.grad is not None for parameter in loaded.parameters())


def test_offloading_raises(packed, tmp_path):
    with pytest.raises(ValueError, match="device_map offloads some weights"):
        device_map = {"model": "disk", "lm_head": "cpu"}
        AutoModelForCausalLM.from_pretrained(packed, device_map=device_map, offload_folder=tmp_path)


WITHOUT = """
import sys, torch
import optimum.commands.optimum_cli
from transformers import AutoModelForCausalLM, LlamaForCausalLM
for load in (
    AutoModelForCausalLM.from_pretrained,
    LlamaForCausalLM.from_pretrained,
    lambda path: LlamaForCausalLM.from_pretrained(path, ignore_mismatched_sizes=True, use_safetensors=True),
):
    try:
        load(sys.argv[1])
    except OSError as error:
        assert "no file named model.safetensors" in str(error), error
    else:
        raise SystemExit("it was loaded")
assert not any(name.startswith("optimum_neuronal") for name in sys.modules)
import optimum_neuronal
optimum_neuronal.transformers_plugin.register()  # again
torch.save(AutoModelForCausalLM.from_pretrained(sys.argv[1]).state_dict(), sys.argv[2])
slow = {"peft", "optimum_neuronal.config.neuronal_config", "optimum_neuronal.blocks", "optimum_neuronal.saliency"}
assert not slow & set(sys.modules), slow & set(sys.modules)  # they take longer to import than a small model to load
"""


def test_a_process_without_the_package_fails_loudly(packed, tmp_path):
    """And loads it when it has imported the package, even late."""
    command = [sys.executable, "-c", WITHOUT, packed, tmp_path / "state.pt"]
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert result.returncode == 0, result.stderr[-2000:]
    assert "Unknown quantization type, got optimum_neuronal" in result.stderr
    for name, value in AutoModelForCausalLM.from_pretrained(packed).state_dict().items():
        assert torch.equal(torch.load(tmp_path / "state.pt")[name], value)
