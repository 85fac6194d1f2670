"""What a save writes is what transformers loads: names, shapes and bits, and what transformers ignores."""

import json

import pytest
import torch
from conftest import make_model
from safetensors.torch import save_file
from sparse_checkpoints import change_config, tensors_of
from transformers import AutoModelForCausalLM, FineGrainedFP8Config

from optimum_neuronal import NeuronALConfig, NeuronALPruner, convert_checkpoint, densify, inspect_checkpoint
from optimum_neuronal.checkpoint import packed_files, writing
from optimum_neuronal.checkpoint.saving import save_pretrained
from optimum_neuronal.model.load_model import load_model


CONFIG = NeuronALConfig(0.7, saliency="magnitude", topup="uniform")
FP8 = {"quant_method": "fp8", "weight_block_size": [16, 16], "activation_scheme": "dynamic"}


def make_source(folder, family, ignored, quantization=None):
    """Save a model in bfloat16 or quantized, with weights of some names that transformers ignores, which are returned."""
    make_model(family, intermediate_size=64, moe_intermediate_size=32).bfloat16().save_pretrained(folder)
    tensors, extra = tensors_of(folder), {name: torch.randn(3, 5) for name in ignored}
    for name, value in [*tensors.items()] if quantization else ():
        if quantization is FP8 and "_proj.weight" in name:
            scales = torch.full([-(-size // 16) for size in value.shape], 2.0)
            tensors |= {name: value.to(torch.float8_e4m3fn), f"{name}_scale_inv": scales}
        elif quantization is not FP8 and name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inputs, outputs = tensors.pop(name).shape
            blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": 120 + blocks[..., 0] % 8}
    save_file(tensors | extra, folder / "model.safetensors", {"format": "pt"})
    change_config(folder, lambda config: config.update(quantization_config=quantization))
    return extra


def announced(folder):
    return json.loads((folder / "config.json").read_text()).get("num_nextn_predict_layers")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("family, part", [("qwen3_next", "mtp.layers.0"), ("deepseek_v3", "model.layers.3")])
def test_weights_that_transformers_ignores_go_along_bit_for_bit(family, part, stream, tmp_path):
    names = [f"{part}.eh_proj.weight", f"{part}.mlp.experts.0.up_proj.weight"]
    source, saved, extra = tmp_path / "source", tmp_path / "saved", make_source(tmp_path / "source", family, names)
    options = {"stream_to": tmp_path / "rewritten", "device": torch.device("cpu")} if stream else {}
    for format, other in (("dense", "packed"), ("packed", "dense")):
        NeuronALPruner.from_pretrained(source, config=CONFIG, **options).quantize(saved / format, format=format)
        convert_checkpoint(saved / format, other, saved / f"{format} converted")
        save_pretrained(load_model(saved / format), saved / f"{format} again", format, "20KB")
    for folder in saved.iterdir():
        found = tensors_of(folder)
        assert all(found[name].dtype == torch.float32 and torch.equal(found[name], extra[name]) for name in names)
        assert not inspect_checkpoint(folder).problems
        assert announced(folder) == (1 if family == "deepseek_v3" else None)


@pytest.mark.parametrize("format", ["dense", "packed"])
@pytest.mark.parametrize("family", ["gpt_oss", "llama", "qwen3_moe", "deepseek_v3"])
def test_a_model_that_was_dequantized_is_saved_as_it_computes(family, format, ids, tmp_path, caplog):
    """What only its quantized checkpoint holds is named before the work, and not announced."""
    extra, quantization = ["model.layers.61.eh_proj.weight"] * (family == "deepseek_v3"), FP8
    options = {"quantization_config": FineGrainedFP8Config(dequantize=True)}
    if family == "gpt_oss":
        options, quantization = {}, {"quant_method": "mxfp4"}
    make_source(tmp_path / "source", family, extra, quantization)
    pruner = NeuronALPruner.from_pretrained(tmp_path / "source", config=CONFIG, dtype=torch.bfloat16, **options)
    model = pruner.quantize(tmp_path / "sparse", format=format)
    saved = densify(AutoModelForCausalLM.from_pretrained(tmp_path / "sparse", dtype=torch.bfloat16))
    assert torch.equal(saved(ids).logits, model(ids).logits) and not inspect_checkpoint(tmp_path / "sparse").problems
    assert not extra or f"does not load {extra[0]}, the blocks of num_nextn" in caplog.text
    assert not announced(tmp_path / "sparse")


@pytest.mark.parametrize("module", [writing, packed_files])
def test_a_save_is_read_back_before_it_appears(module, tmp_path, monkeypatch):
    def damaged(tensors, path, **options):
        save_file({**tensors, "model.norm.weight": -tensors["model.norm.weight"]}, path, **options)

    monkeypatch.setattr(module, "save_file", damaged)
    with pytest.raises(OSError, match="nothing was changed there: model.norm.weight is read back with other values"):
        save_pretrained(make_model("llama"), tmp_path / "model", "dense" if module is writing else "packed")
    assert not list(tmp_path.iterdir())


def test_removed_blocks_do_not_come_back(tmp_path):
    """The config of GPT-2 calls their number n_layer."""
    make_model("gpt2").save_pretrained(tmp_path / "source")
    model = load_model(tmp_path / "source")
    del model.transformer.h[1:]
    model.config.n_layer = 1
    assert not writing.find_extra(model)[0]


def test_a_models_own_tensor_is_not_replaced_by_its_checkpoints(tmp_path):
    make_source(tmp_path / "source", "llama", ["model.own"])
    model = load_model(tmp_path / "source")
    model.model.register_parameter("own", torch.nn.Parameter(torch.full((3, 5), 7.0, dtype=model.dtype)))
    assert "model.own" not in writing.find_extra(model)[0]
