import filecmp
import inspect
import json
import os
import shutil
import subprocess
import sys
from itertools import product

import pytest
import torch
from conftest import FEW, make_model
from packed_models import assert_close, assert_same_state, logits, make_zeroed
from profiles import by_day
from sparse import make_sparse
from transformers import AutoModelForCausalLM, GenerationConfig

from optimum_neuronal import SparseModelForCausalLM, densify, save_pretrained, sparsify
from optimum_neuronal.model.packed_modules import packed_modules
from optimum_neuronal.packed import packed_tensor

from .test_registration import IN_TRANSFORMERS


FILE = "packed-00001-of-00001.safetensors"
FAMILIES = [
    *((family, {}) for family in (*FEW, "qwen3_moe", "gpt_oss", "deepseek_v3", "minimax", "falcon", "gemma3")),
    ("llama", {"tie_word_embeddings": True}),
]
BY_DAY = *((family, {}) for family in ("gpt2", "mixtral", "gpt_oss", "falcon", "deepseek_v3")), FAMILIES[-1]


def save_both(model, folder):
    model.save_pretrained(folder / "dense")
    save_pretrained(model, folder / "packed", format="packed")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A pruned llama, dense and packed; tests that change it copy it."""
    folder = tmp_path_factory.mktemp("saved")
    save_both(make_sparse("llama"), folder)
    return folder


@pytest.mark.parametrize("family, overrides", by_day(FAMILIES, *BY_DAY))
def test_what_sparsify_makes(family, overrides, tmp_path, ids):
    """The same modules with the same bits, of a checkpoint in either format, and the same files when it is saved."""
    model = make_zeroed(family, **overrides)
    save_both(model, tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
    state, expected = {name: value.clone() for name, value in plain.state_dict().items()}, logits(plain, ids)
    packed = sparsify(plain).state_dict()
    for format in ("packed", "dense"):
        loaded, info = SparseModelForCausalLM.from_pretrained(tmp_path / format, output_loading_info=True)
        assert type(loaded) is type(plain) and not loaded.training and not any(info.values())
        assert_same_state(loaded, packed)
        assert loaded.packing.packed == plain.packing.packed
        assert_close(logits(loaded, ids), expected)
        loaded.save_pretrained(tmp_path / f"again {format}")
        for file in (tmp_path / "packed").glob("packed*"):
            assert filecmp.cmp(tmp_path / f"again {format}" / file.name, file, shallow=False)
        assert_same_state(densify(loaded), state)


@pytest.mark.parametrize("family, unpacked", [("llama", 0), ("mixtral", 0), ("deepseek_v3", 0), ("gpt2", 12)])
def test_a_packed_checkpoint_is_not_unpacked(family, unpacked, tmp_path, monkeypatch):
    """Experts are stacked, and saved one by one, packed; only what is stored transposed is unpacked, one at a time."""
    save_pretrained(make_zeroed(family), tmp_path / "packed", format="packed")
    calls, unpack = [], packed_tensor.PackedTensor.unpack
    monkeypatch.setattr(packed_tensor.PackedTensor, "unpack", lambda self: (calls.append(self.shape), unpack(self))[1])
    model = SparseModelForCausalLM.from_pretrained(tmp_path / "packed")
    assert len(calls) == unpacked
    model.save_pretrained(tmp_path / "again")
    assert len(calls) == 2 * unpacked


def test_a_plain_model_but_for_its_modules(saved):
    for format in ("packed", "dense"):
        plain = AutoModelForCausalLM.from_pretrained(saved / format)
        model = SparseModelForCausalLM.from_pretrained(saved / format)
        assert vars(model).keys() == vars(plain).keys() | {"packing", "save_pretrained", "_apply"}
        assert vars(model.config).keys() == vars(plain.config).keys()
        assert not hasattr(model, "is_quantized") and not hasattr(model.config, "quantization_config")
        assert {type(m).__name__ for m in model.modules()} - {"PackedLinear"} <= {
            type(m).__name__ for m in plain.modules()
        }
        assert all(type(m).__module__.startswith(("torch", "transformers", "optimum_")) for m in model.modules())
        assert not any(kind.__name__ == "_Arriving" for m in model.modules() for kind in type(m).__mro__)
        assert vars(densify(model)).keys() == vars(plain).keys(), "and saves in the format that it had"


def test_auto_model_goes_on_giving_dense_models(saved):
    SparseModelForCausalLM.from_pretrained(saved / "packed")
    for _ in range(2):
        assert not list(packed_modules(AutoModelForCausalLM.from_pretrained(saved / "packed")))
        with pytest.raises(ValueError):
            SparseModelForCausalLM.from_pretrained(saved / "packed", attn_implementation="none such")


def test_dtypes_and_devices(saved):
    for dtype in (torch.bfloat16, torch.float16, "auto", "float32"):
        plain = AutoModelForCausalLM.from_pretrained(saved / "dense", dtype=dtype)
        for format, device_map in product(("packed", "dense"), (None, "auto", "cpu")):
            model = SparseModelForCausalLM.from_pretrained(saved / format, dtype=dtype, device_map=device_map)
            assert model.dtype == plain.dtype == model.model.layers[0].mlp.up_proj.values.dtype
            assert_same_state(densify(model), plain.state_dict())


def test_room_is_told_by_the_packed_size(tmp_path):
    """With memory for the packed model alone, none of it is offloaded."""
    model = make_sparse("llama", hidden_size=64, intermediate_size=256, num_hidden_layers=8, vocab_size=64)
    save_both(model, tmp_path)
    memory = {"cpu": int(0.7 * model.get_memory_footprint())}
    for format in ("packed", "dense"):
        loaded = SparseModelForCausalLM.from_pretrained(tmp_path / format, device_map="auto", max_memory=memory)
        assert loaded.packing.packed == 56
        with pytest.raises(ValueError, match="would be offloaded"):
            SparseModelForCausalLM.from_pretrained(tmp_path / format, device_map="auto", max_memory={"cpu": 50_000})


def test_arguments_go_to_the_config_and_the_model(saved, ids):
    model = SparseModelForCausalLM.from_pretrained(
        saved / "packed",
        attn_implementation="eager",
        use_cache=False,
        generation_config=GenerationConfig(max_new_tokens=3),
    )
    assert model.config._attn_implementation == "eager" and model.config.use_cache is False
    assert model.generate(ids[:1]).shape == (1, 19)


def test_arguments_that_are_refused(saved):
    for name, value in (("quantization_config", {}), ("state_dict", {}), ("tp_plan", "auto"), ("gguf_file", "x.gguf")):
        with pytest.raises(ValueError, match=f"takes no {name}: "):
            SparseModelForCausalLM.from_pretrained(saved / "packed", **{name: value})
    with pytest.raises(TypeError, match="Call SparseModelForCausalLM.from_pretrained"):
        SparseModelForCausalLM()
    assert inspect.signature(SparseModelForCausalLM.from_pretrained)


def test_models_that_are_refused(saved, tmp_path):
    make_model("llama").save_pretrained(tmp_path / "not sparse")
    with pytest.raises(ValueError, match="Nothing of the checkpoint is smaller packed"):
        SparseModelForCausalLM.from_pretrained(tmp_path / "not sparse")
    with pytest.raises(OSError):
        SparseModelForCausalLM.from_pretrained(tmp_path / "absent")
    config = json.loads((saved / "dense" / "config.json").read_text())
    (tmp_path / "quantized").mkdir()
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "quantized" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="only floating-point weights can be packed"):
        SparseModelForCausalLM.from_pretrained(tmp_path / "quantized")
    parts = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")
    device_map = {name: "cpu" for name in parts} | {"model.layers": "disk"}
    for format in ("packed", "dense"):
        with pytest.raises(ValueError, match="would be offloaded .device_map."):
            SparseModelForCausalLM.from_pretrained(saved / format, device_map=device_map, offload_folder=tmp_path)


def test_no_bit_of_a_file_may_change(saved, tmp_path):
    folder = shutil.copytree(saved / "packed", tmp_path / "copied")
    content = (folder / FILE).read_bytes()
    for offset in range(100, 3000, 97):
        place = len(content) - offset
        (folder / FILE).write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
        with pytest.raises(ValueError, match="is damaged"):
            SparseModelForCausalLM.from_pretrained(folder)


def test_a_weight_that_is_missing_is_initialised_as_always(saved, tmp_path):
    """transformers tells of it in its report; nothing that was read is taken for it."""
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(saved / "dense", tmp_path / "copied")
    tensors, lost = load_file(folder / "model.safetensors"), "model.layers.1.mlp.up_proj.weight"
    tensors["model.odd.weight"] = tensors.pop(lost)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    model, info = SparseModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert info["missing_keys"] == {lost} and info["unexpected_keys"] == {"model.odd.weight"}
    assert model.packing.left_dense == {"model.layers.1.mlp.up_proj": "not smaller packed"}
    assert 0 < model.model.layers[1].mlp.up_proj.weight.std() < 1


def test_sharded_and_without_the_head(tmp_path, ids):
    model = make_sparse("llama")
    save_pretrained(model, tmp_path / "packed", format="packed", max_shard_size=9_000)
    model.save_pretrained(tmp_path / "dense", max_shard_size=9_000)
    for format in ("packed", "dense"):
        assert len(list((tmp_path / format).glob("*.safetensors"))) > 2
        assert_close(logits(SparseModelForCausalLM.from_pretrained(tmp_path / format), ids), logits(model, ids))
    save_pretrained(model.model, tmp_path / "base", format="packed")
    loaded = SparseModelForCausalLM.from_pretrained(tmp_path / "base")
    assert type(loaded).__name__ == "LlamaModel", "no head is made up"
    assert torch.equal(loaded.layers[0].mlp.up_proj.dense(), model.model.layers[0].mlp.up_proj.weight)


BEGIN = """
import sys
sys.path[:0] = sys.argv[3:]
import optimum_neuronal
"""
PEAK = """
import threading, time
from optimum_neuronal import SparseModelForCausalLM
SparseModelForCausalLM.from_pretrained(sys.argv[1])  # all is imported
def anonymous():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon")) * 1024
before, peak, over = anonymous(), 0, False
def watch():
    global peak
    while not over:
        peak = max(peak, anonymous())
        time.sleep(0.0005)
thread = threading.Thread(target=watch)
thread.start()
model = SparseModelForCausalLM.from_pretrained(sys.argv[2])
over = True
thread.join()
print((peak - before) / model.packing.dense_bytes, model.packing.packed_bytes / model.packing.dense_bytes)
"""


@pytest.mark.parametrize("format", by_day(["packed", "dense"], "packed"))
def test_memory(saved, tmp_path, format):
    """At most the packed model and few projections, each of which is a sixtieth of the dense ones.

    The process imports this package before transformers, which knows its quantizer then.
    """
    model = make_zeroed(
        "llama", sparsity=0.8, hidden_size=384, intermediate_size=768, num_hidden_layers=12, num_attention_heads=8,
        num_key_value_heads=8,
    )  # fmt: skip
    save_pretrained(model, tmp_path, format=format)
    on_linux = sys.platform == "linux"  # which alone tells what is not mapped from files
    command = [sys.executable, "-c", BEGIN + IN_TRANSFORMERS + PEAK * on_linux, saved / format, tmp_path, *sys.path]
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert result.returncode == 0, result.stderr[-2000:]
    if on_linux:
        peak, packed = map(float, result.stdout.split())
        assert packed < 0.25 and packed < peak < packed + 0.08
