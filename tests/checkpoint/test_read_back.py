"""What a save writes is what transformers loads: names, shapes and bits, and what transformers ignores."""

import json

import pytest
import torch
from conftest import make_model
from safetensors.torch import save_file
from sparse_checkpoints import change_config, tensors_of
from transformers import AutoModelForCausalLM, FineGrainedFP8Config

from optimum_neuronal import (
    NeuronALConfig,
    NeuronALPruner,
    convert_checkpoint,
    densify,
    inspect_checkpoint,
    save_pretrained,
)
from optimum_neuronal.checkpoint import packed_files, writing
from optimum_neuronal.model.load_model import load_model


CONFIG = NeuronALConfig(0.7, saliency="magnitude", topup="uniform")
DEQUANTIZED = {"quantization_config": FineGrainedFP8Config(dequantize=True)}
IGNORED = {  # by the family, or as a block beyond the last
    "qwen3_next": ("mtp.fc.weight", "mtp.layers.0.mlp.experts.0.gate_proj.weight"),
    "deepseek_v3": ("model.layers.3.eh_proj.weight", "model.layers.3.mlp.experts.0.up_proj.weight"),
    "deepseek_v3 in fp8": ("model.layers.61.eh_proj.weight",),
}


def make_source(folder, family, change=lambda tensors: tensors):
    """Save a model in bfloat16, its tensors changed, with weights that transformers ignores, which are returned."""
    sizes = {"intermediate_size": 64, "moe_intermediate_size": 32}
    make_model(family.split()[0], **sizes).bfloat16().save_pretrained(folder)
    ignored = {name: torch.randn(3, 5) for name in IGNORED.get(family, ())}
    save_file(change(tensors_of(folder)) | ignored, folder / "model.safetensors", {"format": "pt"})
    return ignored


def to_fp8(tensors):
    """Blocks of 16 x 16, whose scales are 2."""
    chosen = {name: value for name, value in tensors.items() if "_proj.weight" in name}
    scales = {
        f"{name}_scale_inv": 2 * torch.ones(-(-len(v) // 16), -(-v.shape[1] // 16)) for name, v in chosen.items()
    }
    return tensors | {name: value.to(torch.float8_e4m3fn) for name, value in chosen.items()} | scales


def to_mxfp4(tensors):
    found = {}
    for name, value in tensors.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inputs, outputs = value.shape
            blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
            found |= {f"{name}_blocks": blocks, f"{name}_scales": 120 + blocks[..., 0] % 8}
        else:
            found[name] = value
    return found


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("family", ["qwen3_next", "deepseek_v3"])
def test_weights_that_transformers_ignores_go_along_bit_for_bit(family, stream, tmp_path):
    ignored = make_source(tmp_path / "source", family)
    options = {"stream_to": tmp_path / "rewritten", "device": torch.device("cpu")} if stream else {}
    for format, other in (("dense", "packed"), ("packed", "dense")):
        pruner, saved = NeuronALPruner.from_pretrained(tmp_path / "source", config=CONFIG, **options), tmp_path / "saved"
        pruner.quantize(saved / format, format=format)
        convert_checkpoint(saved / format, other, saved / f"{format} converted")
        save_pretrained(load_model(saved / format), saved / f"{format} again", format, "20KB")
    for folder in saved.iterdir():
        found = tensors_of(folder)
        assert all(found[name].dtype == torch.float32 and torch.equal(found[name], ignored[name]) for name in ignored)
        assert not inspect_checkpoint(folder).problems
        announced = json.loads((folder / "config.json").read_text()).get("num_nextn_predict_layers")
        assert announced == (1 if family == "deepseek_v3" else None)


@pytest.mark.parametrize("format", ["dense", "packed"])
@pytest.mark.parametrize("family", ["gpt_oss", "llama in fp8", "qwen3_moe in fp8", "deepseek_v3 in fp8"])
def test_a_model_that_was_dequantized_is_saved_as_it_computes(family, format, ids, tmp_path, caplog):
    """What only its quantized checkpoint holds is named before the work, and not announced."""
    is_fp8, quantization = "fp8" in family, {"quant_method": "mxfp4"}
    if is_fp8:
        quantization = {"quant_method": "fp8", "weight_block_size": [16, 16], "activation_scheme": "dynamic"}
    ignored = make_source(tmp_path / "source", family, to_fp8 if is_fp8 else to_mxfp4)
    change_config(tmp_path / "source", lambda config: config.update(quantization_config=quantization))
    options = DEQUANTIZED if is_fp8 else {}
    pruner = NeuronALPruner.from_pretrained(tmp_path / "source", config=CONFIG, dtype=torch.bfloat16, **options)
    model = pruner.quantize(tmp_path / "sparse", format=format)
    saved = densify(AutoModelForCausalLM.from_pretrained(tmp_path / "sparse", dtype=torch.bfloat16))
    assert torch.equal(saved(ids).logits, model(ids).logits)
    assert not inspect_checkpoint(tmp_path / "sparse").problems
    assert not ignored or f"does not load {min(ignored)}, the blocks of num_nextn" in caplog.text
    assert json.loads((tmp_path / "sparse" / "config.json").read_text()).get("num_nextn_predict_layers", 0) == 0


@pytest.mark.parametrize("module", [writing, packed_files])
def test_a_save_is_read_back_before_it_appears(module, tmp_path, monkeypatch):
    def damaged(tensors, path, **options):
        name = max(tensors)
        save_file({**tensors, name: tensors[name] ^ 1 if name.endswith("mask") else -tensors[name]}, path, **options)

    monkeypatch.setattr(module, "save_file", damaged)
    with pytest.raises(OSError, match="nothing was changed there: model.norm.weight is read back with other values"):
        save_pretrained(make_model("llama"), tmp_path / "model", "dense" if module is writing else "packed")
    assert not list(tmp_path.iterdir())
