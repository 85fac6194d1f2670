import pytest
import torch
import transformers
from conftest import make_model
from packaging.version import Version
from transformers import AutoModelForCausalLM

from optimum_neuronal import NeuronALConfig, NeuronALPruner
from optimum_neuronal.model.loading import load_skeleton, load_streamed, streamed_device_map


OLD = Version(transformers.__version__) < Version("5.17")
CPU = torch.device("cpu")


@pytest.mark.parametrize("family", ["llama", "gpt2"] if OLD else ["llama", "gpt2", "mixtral"])
def test_a_streamed_model_is_pruned_and_saved_like_any_other(family, ids, tmp_path):
    make_model(family).save_pretrained(tmp_path / "dense")
    config = NeuronALConfig(
        0.7,
        topup="neuronal",
        num_samples=12,
        num_alignment_samples=4,
        block_lambdas=[0.1],
        row_lambdas=[0, 0.1],
        saliency="wanda",
    )
    results = {}
    for name, options in (("streamed", {"stream_to": tmp_path / "rewritten", "device": CPU}), ("whole", {})):
        pruner = NeuronALPruner.from_pretrained(tmp_path / "dense", config=config, **options)
        assert all(parameter.is_meta for parameter in pruner.model.parameters()) == (name == "streamed")
        pruner.quantize(tmp_path / name, dataset=ids)
        results[name] = AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict()
    assert all(torch.equal(value, results["whole"][key]) for key, value in results["streamed"].items())


def test_shards_stay_small(ids, tmp_path, monkeypatch):
    monkeypatch.setattr("optimum_neuronal.checkpoint.saving.OFFLOADED_SHARD", 1)  # hence a block of 40 kB
    make_model("llama").save_pretrained(tmp_path / "dense")
    config = NeuronALConfig(0.7, saliency="magnitude", topup="uniform")
    pruner = NeuronALPruner.from_pretrained(tmp_path / "dense", config=config, stream_to=tmp_path / "r", device=CPU)
    model = pruner.quantize(tmp_path / "sparse")
    shards = list((tmp_path / "sparse").glob("model-*.safetensors"))
    assert len(shards) > 1 and all(shard.stat().st_size < 60_000 for shard in shards)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "sparse")
    assert torch.equal(reloaded(ids).logits, model(ids).logits)


def test_on_an_accelerator_only_the_blocks_stay_on_disk():
    device = torch.device("cuda", 0)
    for family, blocks in (
        ("llama", "model.layers"),
        ("gpt2", "transformer.h"),
        ("gemma3", "model.language_model.layers"),
    ):
        model = make_model(family)
        placed = streamed_device_map(model, device)
        assert [name for name, place in placed.items() if place == "disk"] == [blocks]
        for name, _ in model.named_parameters():
            holders = [module for module in placed if name.startswith(module + ".")]
            assert len(holders) == 1, name
    assert streamed_device_map(model, CPU) == {"": "disk"}


def test_the_dtype_is_the_checkpoints_or_the_users(tmp_path):
    make_model("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    for dtype, expected in (("auto", torch.bfloat16), (torch.float32, torch.float32)):
        model = load_streamed(tmp_path, CPU, tmp_path / "r", dtype=dtype)
        assert model.model.layers[0]._hf_hook is not None
        assert model.model.layers[0].mlp.up_proj._hf_hook.weights_map["weight"].dtype == expected


def test_a_skeleton_has_shapes_and_dtypes_and_no_weights(tmp_path):
    model = make_model("llama").to(torch.bfloat16)
    model.config.save_pretrained(tmp_path)  # no file with weights
    skeleton = load_skeleton(tmp_path)
    expected = {name: parameter.shape for name, parameter in model.named_parameters()}
    assert {name: parameter.shape for name, parameter in skeleton.named_parameters()} == expected
    assert all(parameter.is_meta for parameter in skeleton.parameters())


def test_a_skeletons_dtype_is_the_configs_or_the_users(tmp_path):
    config = make_model("llama").config
    for own, asked, expected in [
        (torch.bfloat16, "auto", torch.bfloat16),
        (None, "auto", torch.float32),
        (torch.bfloat16, "float16", torch.float16),
        (torch.bfloat16, torch.float64, torch.float64),
    ]:
        config.dtype = own
        config.save_pretrained(tmp_path)
        assert load_skeleton(tmp_path, asked).dtype == expected
    for dtype in ("int8", torch.int8, "half a byte"):
        with pytest.raises(ValueError, match="expected 'auto', 'float32', 'bfloat16' or 'float16'"):
            load_skeleton(tmp_path, dtype)


def test_on_a_cpu_no_skeleton_is_needed(tmp_path, monkeypatch):
    make_model("llama").save_pretrained(tmp_path)
    monkeypatch.setattr("optimum_neuronal.model.loading.load_skeleton", None)
    assert load_streamed(tmp_path, CPU, tmp_path / "r").hf_device_map == {"": "disk"}


def test_an_accelerators_device_map_comes_from_the_skeleton(tmp_path, monkeypatch):
    make_model("llama").config.save_pretrained(tmp_path / "folder")
    asked = {}
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *args, **options: asked.update(options))
    options = {"revision": "main", "subfolder": "folder", "dtype": "auto"}
    load_streamed(tmp_path, torch.device("cuda", 0), tmp_path / "r", **options)
    assert asked["device_map"]["model.layers"] == "disk"
    assert asked["device_map"]["lm_head"] == torch.device("cuda", 0)
    assert asked["revision"] == "main" and asked["dtype"] == "auto"
