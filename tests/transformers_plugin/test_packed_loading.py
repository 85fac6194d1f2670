import copy
import json
import operator
import os
import pickle
import subprocess
import sys

import peft
import pytest
import safetensors
import torch
import transformers
from profiles import by_day
from sparse import make_sparse
from transformers import AutoModel, AutoModelForCausalLM, LlamaForCausalLM, modeling_utils

from optimum_neuronal import NeuronALConfig, NeuronALPruner
from optimum_neuronal.checkpoint.save_pretrained import save_packed_by_default
from optimum_neuronal.transformers_plugin.packed_loading import PackedConfig

from .conftest import used_as_plain


INDEX, FILE = "packed.safetensors.index.json", "packed-00001-of-00001.safetensors"


def pruned(family="llama", dtype=torch.float32, **overrides):
    model = make_sparse(family, **overrides).to(dtype)
    save_packed_by_default(model)
    return model


def assert_equal(model, expected):
    """To the bit, -0.0 included."""
    state = model.state_dict()
    assert state.keys() == expected.state_dict().keys()
    for name, value in expected.state_dict().items():
        assert state[name].dtype == value.dtype, name
        assert torch.equal(state[name].view(torch.uint8), value.view(torch.uint8)), name


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """A packed llama; tests that change it copy it."""
    folder = tmp_path_factory.mktemp("packed") / "llama"
    pruned().save_pretrained(folder)
    return folder


FAMILIES = [
    ("llama", {}), ("llama", {"tie_word_embeddings": True}), ("opt", {}), ("gpt2", {}), ("phi3", {}), ("qwen3_moe", {}),
    ("mixtral", {}),
]  # fmt: skip


@pytest.mark.parametrize("family, overrides", by_day(FAMILIES, FAMILIES[1], ("gpt2", {}), ("mixtral", {})))
def test_bit_equal(family, overrides, tmp_path):
    for dtype, device_map, size in (
        (torch.bfloat16, None, "1GB"),
        (torch.float32, "auto", 20_000),
        (torch.bfloat16, "cpu", 9_000),
    ):
        model = pruned(family, dtype, **overrides)
        projection = next(
            weight for name, weight in model.named_parameters() if weight.ndim > 1 and (weight == 0).any()
        )
        projection.data.view(-1)[(projection.view(-1) == 0).nonzero()[0]] = -0.0
        folder = tmp_path / str(size)
        model.save_pretrained(folder, max_shard_size=size)
        assert (len(list(folder.glob("packed-*.safetensors"))) > 1) == (size != "1GB")
        loaded = AutoModelForCausalLM.from_pretrained(folder, device_map=device_map)
        assert_equal(loaded, model)
        if dtype == torch.float32:  # of the other model, `.to` has cast buffers too
            with torch.no_grad():
                assert torch.equal(loaded(torch.arange(16)[None]).logits, model(torch.arange(16)[None]).logits)


def test_another_dtype_is_asked_for(packed):
    loaded = AutoModelForCausalLM.from_pretrained(packed, dtype=torch.bfloat16)
    assert_equal(loaded, AutoModelForCausalLM.from_pretrained(packed).bfloat16())


def test_without_the_head(packed):
    """What a checkpoint holds beyond the model is left alone, as of dense ones."""
    base = AutoModel.from_pretrained(packed)
    assert_equal(base, AutoModelForCausalLM.from_pretrained(packed).model)


def test_weights_that_stay_on_disk(packed, tmp_path):
    expected = AutoModelForCausalLM.from_pretrained(packed)
    device_map = {name: "cpu" for name in ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")}
    device_map |= {"model.layers": "disk"}
    model = AutoModelForCausalLM.from_pretrained(packed, device_map=device_map, offload_folder=tmp_path)
    assert model.model.layers[0].mlp.up_proj.weight.is_meta
    ids = torch.arange(16)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected(ids).logits)
    model.save_pretrained(tmp_path / "again")
    assert_equal(AutoModelForCausalLM.from_pretrained(tmp_path / "again"), expected)


def test_what_is_loaded_is_a_plain_model(packed, tmp_path):
    model = LlamaForCausalLM.from_pretrained(packed)
    pruned().save_pretrained(tmp_path / "dense", format="dense")
    plain = LlamaForCausalLM.from_pretrained(tmp_path / "dense")
    assert vars(model).keys() - vars(plain).keys() == {"save_pretrained"}
    assert vars(model.config).keys() == vars(plain.config).keys()
    assert not hasattr(model, "is_quantized") and not hasattr(model.config, "quantization_config")
    assert model.config.sparsity_config == plain.config.sparsity_config, "in memory it is dense"
    merged = used_as_plain(model)
    assert_equal(merged, plain)
    merged.save_pretrained(tmp_path / "merged")
    assert (tmp_path / "merged" / FILE).exists()


def test_an_adapter_over_it(packed, tmp_path):
    peft.get_peft_model(
        LlamaForCausalLM.from_pretrained(packed), peft.LoraConfig(target_modules=["q_proj"])
    ).save_pretrained(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    assert not list(tmp_path.glob("packed*")) and not list(tmp_path.glob("model*"))
    model = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path)
    assert_equal(model.merge_and_unload(), LlamaForCausalLM.from_pretrained(packed))


def test_it_is_sparse_already(packed):
    config = NeuronALConfig(0.8, saliency="magnitude", topup="uniform")
    with pytest.raises(
        ValueError, match=r"is sparse already.* del model.config.sparsity_config, and call NeuronALPruner"
    ):
        AutoModelForCausalLM.from_pretrained(packed, quantization_config=config)
    model = AutoModelForCausalLM.from_pretrained(packed)
    del model.config.sparsity_config
    NeuronALPruner(config).prune(model)
    assert model.config.sparsity_config["achieved_sparsity"] == pytest.approx(0.8, abs=0.01)


def test_the_config_of_another_tool(packed):
    for passed, name in (
        (transformers.TorchAoConfig.__new__(transformers.TorchAoConfig), "TorchAoConfig"),
        (transformers.BitsAndBytesConfig.__new__(transformers.BitsAndBytesConfig), "BitsAndBytesConfig"),
        ({"quant_method": "quanto", "weights": "int8"}, "dict"),
    ):
        with pytest.raises(
            ValueError, match=f"is packed.*{name}.*optimum-cli neuronal convert DIR --format dense --output"
        ):
            AutoModelForCausalLM.from_pretrained(packed, quantization_config=passed)


def test_the_class_of_the_config_is_a_class_like_others():
    config = PackedConfig()
    assert repr(PackedConfig) == "<class 'optimum_neuronal.transformers_plugin.packed_loading.PackedConfig'>"
    assert PackedConfig.__name__ == "PackedConfig" and not operator.ne(PackedConfig.__name__, "PackedConfig")
    assert f"{PackedConfig.__name__}" in {"PackedConfig"} and repr(config).startswith("PackedConfig {")
    assert pickle.loads(pickle.dumps(PackedConfig)) is PackedConfig is copy.deepcopy(PackedConfig)
    for again in (pickle.loads(pickle.dumps(config)), copy.copy(config), copy.deepcopy(config)):
        assert type(again) is PackedConfig and again.to_dict() == config.to_dict()


def damaged(packed, tmp_path, name, change):
    folder = tmp_path / "damaged"
    folder.mkdir()
    for file in packed.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / name).write_bytes(change((packed / name).read_bytes()))
    return folder


def with_config(change):
    def edit(content):
        stored = json.loads(content)
        change(stored)
        return json.dumps(stored).encode()

    return edit


@pytest.mark.parametrize(
    "name, change, message",
    [
        (FILE, lambda content: content[:-1], f"{FILE} is damaged, or no safetensors file"),
        (FILE, lambda content: content[:-1] + b"~", rf"{FILE}: model\.\S+ is damaged"),
        (INDEX, lambda content: content[:100], f"{INDEX} is damaged"),
        (INDEX, lambda content: content.replace(FILE.encode(), b"../../secret.safetensors"), "expected the name of a .safetensors file in the same"),
        ("config.json", with_config(lambda config: config.update(intermediate_size=40)), r"has the shape \(\d+, \d+\), but the model's"),
    ],
)  # fmt: skip
def test_damage_is_an_error_that_says_where(packed, tmp_path, name, change, message):
    folder = damaged(packed, tmp_path, name, change)
    for device_map in (None, "auto"):
        with pytest.raises(ValueError, match=message):
            AutoModelForCausalLM.from_pretrained(folder, device_map=device_map)


def test_files_are_read_in_no_other_way(packed, monkeypatch):
    """If transformers reads them without this package's reader, it finds no file."""
    with pytest.raises(FileNotFoundError, match="without disable_mmap=True"):
        AutoModelForCausalLM.from_pretrained(packed, disable_mmap=True)
    monkeypatch.setattr(hf_private, "set_file_opener", lambda opener: None)
    monkeypatch.setattr(modeling_utils, "safe_open", safetensors.safe_open)
    with pytest.raises(FileNotFoundError, match="only to be read"):
        AutoModelForCausalLM.from_pretrained(packed)


WITHOUT = """
import sys, torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM
for load in (
    AutoModelForCausalLM.from_pretrained,
    LlamaForCausalLM.from_pretrained,
    lambda path: LlamaForCausalLM.from_pretrained(path, device_map="auto"),
    lambda path: LlamaForCausalLM.from_pretrained(path, ignore_mismatched_sizes=True, use_safetensors=True),
):
    try:
        load(sys.argv[1])
    except ValueError as error:
        assert "`import optimum_neuronal` before loading" in str(error) and "neuronal convert" in str(error), error
    else:
        raise SystemExit("it was loaded")
assert not any(name.startswith("optimum_neuronal") for name in sys.modules)
import optimum_neuronal
torch.save(AutoModelForCausalLM.from_pretrained(sys.argv[1]).state_dict(), sys.argv[2])
slow = {"peft", "optimum_neuronal.config.methods", "optimum_neuronal.blocks", "optimum_neuronal.packed.ops"}
assert not slow & set(sys.modules), slow & set(sys.modules)  # they take longer to import than a small model to load
"""


def test_a_process_without_the_package_fails_loudly(packed, tmp_path):
    """By an error that names it; and loads it when it has imported the package, even late, and nothing else of it."""
    command = [sys.executable, "-c", WITHOUT, packed, tmp_path / "state.pt"]
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert result.returncode == 0, result.stderr[-2000:]
    assert "Unknown quantization type, got optimum_neuronal" in result.stderr, "all that lm-eval says"
    for name, value in AutoModelForCausalLM.from_pretrained(packed).state_dict().items():
        assert torch.equal(torch.load(tmp_path / "state.pt")[name], value)


def test_the_pipeline_loads_it(packed, tokenizer):
    generator = transformers.pipeline("text-generation", model=str(packed), tokenizer=tokenizer)
    assert generator("w1 w2", max_new_tokens=2)[0]["generated_text"].startswith("w1 w2")
