"""Loading checkpoints with quantised weights: these stay packed however they are loaded, sparse ones if they are asked to."""

import copy
import filecmp
import json
from concurrent.futures import ThreadPoolExecutor

import peft
import pytest
import torch
from few_bits import held, make_few_bits
from packed_models import assert_close, assert_same_state, logits
from profiles import by_day
from sparse_checkpoints import change_config
from transformers import AutoModel, AutoModelForCausalLM, LlamaForCausalLM

from optimum_neuronal import SparseModelForCausalLM, densify, save_pretrained
from optimum_neuronal.checkpoint.packed_reading import PackedFile
from optimum_neuronal.model.packed_modules import packed_modules


LOADERS = (AutoModelForCausalLM, SparseModelForCausalLM)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A model with weights in every packed form, and its checkpoint; tests that change one copy it."""
    folder, model = tmp_path_factory.mktemp("saved") / "llama", make_few_bits(sparse=True)
    model.save_pretrained(folder)
    return model, folder


def same_files(folder, other) -> bool:
    names = sorted(path.name for path in folder.iterdir())
    assert names == sorted(path.name for path in other.iterdir())
    return filecmp.cmpfiles(folder, other, names, shallow=False) == (names, [], [])


def dense_state(model) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in densify(copy.deepcopy(model)).state_dict().items()}


FAMILIES = [
    ("llama", {}), ("llama", {"tie_word_embeddings": True}), ("gpt2", {}), ("opt", {}), ("mixtral", {}), ("qwen3_moe", {}),
    ("gpt_oss", {}), ("deepseek_v3", {}), ("falcon", {}),
]  # fmt: skip
BY_DAY = FAMILIES[1], FAMILIES[2], FAMILIES[4], FAMILIES[6]


@pytest.mark.parametrize("sparse", [False, True], ids=["quantised", "and sparse"])
@pytest.mark.parametrize("family, overrides", by_day(FAMILIES, *BY_DAY))
def test_what_is_loaded_is_what_was_saved(family, overrides, sparse, tmp_path, ids):
    """The same numbers and logits; saved again in several files, the same files."""
    model = make_few_bits(family, sparse, **overrides)
    formats, expected, dense = held(model), logits(model, ids), dense_state(model)
    assert set(formats.values()) == ({"quantized", "sparse"} if sparse else {"quantized"})
    model.save_pretrained(tmp_path / "model", max_shard_size=20_000)
    assert json.loads((tmp_path / "model" / "config.json").read_text())["quantization_config"]["quantized"] is True
    for loader in LOADERS:
        loaded, info = loader.from_pretrained(tmp_path / "model", output_loading_info=True)
        assert type(loaded) is type(model) and not loaded.training and not any(info.values())
        kept = formats if loader is SparseModelForCausalLM else {
            name: format for name, format in formats.items() if format == "quantized"
        }  # fmt: skip
        assert held(loaded) == kept
        if loader is SparseModelForCausalLM or not sparse:
            assert torch.equal(logits(loaded, ids), expected)
        assert_close(logits(loaded, ids), expected)
        loaded.save_pretrained(tmp_path / loader.__name__, max_shard_size=20_000)
        assert same_files(tmp_path / loader.__name__, tmp_path / "model")
        assert_same_state(densify(loaded), dense)
    save_pretrained(model, tmp_path / "dense", format="dense")
    assert "quantization_config" not in json.loads((tmp_path / "dense" / "config.json").read_text())
    assert_same_state(AutoModelForCausalLM.from_pretrained(tmp_path / "dense"), dense)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, "auto", "float32"])
def test_dtypes_and_devices(saved, dtype):
    """Codes, scales and steps keep their bits in every dtype."""
    model, folder = saved
    for loader in LOADERS:
        for device_map in (None, "auto", "cpu"):
            loaded = loader.from_pretrained(folder, dtype=dtype, device_map=device_map)
            assert loaded.dtype == (getattr(torch, dtype, torch.float32) if isinstance(dtype, str) else dtype)
            for name, tensors in quantised(model).items():
                found = quantised(loaded)[name]
                assert all(
                    torch.equal(found[key], tensor) and found[key].dtype == tensor.dtype
                    for key, tensor in tensors.items()
                )
            assert_same_state(densify(loaded), dense_state(copy.deepcopy(model).to(loaded.dtype)))


def quantised(model) -> dict[str, dict[str, torch.Tensor]]:
    """Return the tensors of all quantised weights, by the name of their module."""
    owners = {name: module for name, module in packed_modules(model) if module.format == "quantized" and module.owned}
    return {name: module.matrix.tensors() for name, module in owners.items()}


def test_a_dtype_without_kernels_unpacks_them(saved):
    loaded = AutoModelForCausalLM.from_pretrained(saved[1], dtype=torch.float64)
    assert not held(loaded)
    assert_same_state(loaded, densify(copy.deepcopy(saved[0])).double().state_dict())


def test_saved_in_another_dtype_nothing_is_lost(saved, tmp_path):
    """Rounded to bfloat16 and back, elements are the same: files hold codes."""
    model, folder = saved
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(tmp_path)
    found = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    names = [name for name, format in held(model).items() if format == "quantized"]
    assert names and all(
        torch.equal(found.get_submodule(name).dense(), model.get_submodule(name).dense()) for name in names
    )


def test_without_the_head(saved):
    model, folder = saved
    base = AutoModel.from_pretrained(folder)
    assert_same_state(densify(base), dense_state(model.model))


def test_a_load_in_another_thread_while_one_is_under_way(saved, ids, monkeypatch):
    """One keeps sparse weights packed, the other unpacks them. (transformers itself cannot interleave loads freely.)"""
    model, folder = saved
    expected, read = logits(model, ids), PackedFile.get_slice
    for outer, inner in (LOADERS, LOADERS[::-1]):
        found = []

        def watched(*args, inner=inner, found=found):
            if not found:
                found.append(None)
                with ThreadPoolExecutor(1) as pool:
                    found[:] = [pool.submit(inner.from_pretrained, folder).result(timeout=60)]
            return read(*args)

        with monkeypatch.context() as patch:
            patch.setattr(PackedFile, "get_slice", watched)
            found.insert(0, outer.from_pretrained(folder))
        for loader, loaded in zip((outer, inner), found, strict=True):
            kept = {"quantized"} if loader is AutoModelForCausalLM else {"quantized", "sparse"}
            assert set(held(loaded).values()) == kept
            assert_close(logits(loaded, ids), expected)


def test_room_is_told_by_the_packed_size(saved, tmp_path):
    """With memory for the packed model alone, nothing is offloaded; what would be is refused."""
    model = make_few_bits(num_hidden_layers=8, hidden_size=64, intermediate_size=256)
    model.save_pretrained(tmp_path)
    memory = {"cpu": int(1.2 * model.get_memory_footprint())}
    assert memory["cpu"] < 0.5 * model.packing.dense_bytes
    for loader in LOADERS:
        loaded = loader.from_pretrained(tmp_path, device_map="auto", max_memory=memory)
        assert held(loaded) == held(model)
        with pytest.raises(ValueError, match="would be offloaded .device_map.* convert DIR --format dense --output"):
            loader.from_pretrained(tmp_path, device_map="auto", max_memory={"cpu": 20_000}, offload_folder=tmp_path)


@pytest.mark.parametrize("flag", [None, False, "yes", 1])
def test_a_config_that_does_not_know_of_them(saved, tmp_path, flag, ids):
    """Then AutoModel unpacks all of them; only `true` keeps them."""
    model, _ = saved
    model.save_pretrained(tmp_path)
    change_config(tmp_path, lambda config: config["quantization_config"].update(quantized=flag))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not held(plain)
    assert_same_state(plain, dense_state(model))
    assert held(SparseModelForCausalLM.from_pretrained(tmp_path)) == held(model)


def test_a_config_that_knows_of_some_where_there_are_none(saved, tmp_path):
    """The model is a plain one, and saves packed."""
    model = densify(copy.deepcopy(saved[0]))
    save_pretrained(model, tmp_path, format="packed")
    change_config(tmp_path, lambda config: config["quantization_config"].update(quantized=True))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not held(loaded) and not hasattr(loaded, "packing")
    assert_same_state(loaded, model.state_dict())
    loaded.save_pretrained(tmp_path / "again")
    about = json.loads((tmp_path / "again" / "config.json").read_text())["quantization_config"]
    assert about == {"quant_method": "optimum_neuronal", "format": "packed", "version": 1}


def test_what_is_loaded_is_a_plain_model_but_for_its_modules(saved, tmp_path):
    save_pretrained(saved[0], tmp_path, format="dense")
    loaded, plain = LlamaForCausalLM.from_pretrained(saved[1]), LlamaForCausalLM.from_pretrained(tmp_path)
    assert vars(loaded).keys() == vars(plain).keys() | {"packing", "save_pretrained", "_apply"}
    assert vars(loaded.config).keys() == vars(plain.config).keys()
    assert not hasattr(loaded, "is_quantized") and not hasattr(loaded.config, "quantization_config")
    assert not any(kind.__name__ == "_Arriving" for m in loaded.modules() for kind in type(m).__mro__)


def test_adapters_need_dense_weights(saved):
    """PEFT's error quotes what to do."""
    loaded, config = (
        AutoModelForCausalLM.from_pretrained(saved[1]),
        peft.LoraConfig(target_modules=r".*layers\.1.*q_proj"),
    )
    with pytest.raises(ValueError, match="to train it, call optimum_neuronal.densify"):
        peft.get_peft_model(loaded, config)
    peft.get_peft_model(densify(AutoModelForCausalLM.from_pretrained(saved[1])), config)


def test_damage_is_an_error_that_says_where(saved, tmp_path):
    """Of the last bytes of every weight's tensors, whoever reads them."""
    saved[0].save_pretrained(tmp_path)
    file = tmp_path / "packed-00001-of-00001.safetensors"
    content = file.read_bytes()
    for offset in range(8, len(content) // 2, len(content) // 20):
        place = len(content) - offset
        file.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
        for loader in LOADERS:
            with pytest.raises(ValueError, match=rf"{file.name}: \S+ is damaged: its checksum is"):
                loader.from_pretrained(tmp_path)
