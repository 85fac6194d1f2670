import json
import shutil

import pytest
import torch
from conftest import make_model
from packed_models import make_zeroed
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from sparse_checkpoints import all_files, change_config, same, save_pruned, tensors_of

from optimum_neuronal import NeuronALConfig, NeuronALPruner, convert_checkpoint, inspect_checkpoint, save_pretrained


@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt_oss", "gpt2"])
@pytest.mark.parametrize("shard", ["2GB", 20_000])
def test_there_and_back(family, shard, tmp_path, tokenizer):
    """Every tensor to the bit, and every other file."""
    _, model = save_pruned(tmp_path / "dense", family, tokenizer, dtype=torch.bfloat16)
    (tmp_path / "dense" / "additional_chat_templates").mkdir()
    (tmp_path / "dense" / "additional_chat_templates" / "tool.jinja").write_text("{{ x }}")
    before = all_files(tmp_path / "dense")
    packed = convert_checkpoint(tmp_path / "dense", "packed", tmp_path / "new" / "dense", shard)
    assert not list(packed.glob("model*.safetensors*"))
    assert not inspect_checkpoint(packed).problems
    again = convert_checkpoint(packed, "dense", tmp_path / "again" / "dense", shard)
    assert same(tensors_of(tmp_path / "dense"), tensors_of(again))
    after = all_files(again)
    assert {name for name in before if "safetensors" not in name} <= after.keys()
    for name in ("generation_config.json", "neuronal_report.json", "tokenizer.json", "README.md"):
        assert before[name] == after[name], name
    assert json.loads(after["config.json"]) == json.loads(before["config.json"])
    assert all_files(tmp_path / "dense") == before, "the source is only read"


def test_the_dtype_is_that_of_the_weights_whatever_the_config_says(tmp_path):
    """Each weight keeps its own, to the bit, though transformers loads all in one."""
    save_pruned(tmp_path / "dense", dtype=torch.bfloat16)
    tensors = tensors_of(tmp_path / "dense")
    for part, dtype in (("up_proj", torch.float16), ("down_proj", torch.float32)):
        tensors |= {name: value.to(dtype) * 1.001 for name, value in tensors.items() if part in name}
    save_file(tensors, tmp_path / "dense" / "model.safetensors", metadata={"format": "pt"})
    change_config(tmp_path / "dense", lambda config: config.update(dtype="float16"))
    packed = convert_checkpoint(tmp_path / "dense", "packed", tmp_path / "packed")
    with pytest.raises(ValueError, match="packs weights in several dtypes, of which some would be rounded"):
        convert_checkpoint(packed, "dense", tmp_path / "again")
    save_pretrained(make_zeroed("llama"), tmp_path / "other", format="packed")
    change_config(tmp_path / "other", lambda config: config.update(dtype="bfloat16"))
    found = tensors_of(convert_checkpoint(tmp_path / "other", "dense", tmp_path / "dense other"))
    assert same(found, make_zeroed("llama").state_dict())


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts_in_one_tensor_are_verified_again_one_by_one(family, tmp_path):
    make_model(family).save_pretrained(tmp_path / "source", save_original_format=False)
    config = NeuronALConfig(0.7, saliency="magnitude", topup="uniform")
    NeuronALPruner.from_pretrained(tmp_path / "source", config=config).quantize(tmp_path / "dense")
    convert_checkpoint(tmp_path / "dense", "packed", tmp_path / "packed")
    convert_checkpoint(tmp_path / "packed", "dense", tmp_path / "again")
    assert tensors_of(tmp_path / "dense").keys() == tensors_of(tmp_path / "again").keys()
    for name in ("dense", "packed", "again"):
        assert not inspect_checkpoint(tmp_path / name).problems


def test_what_cannot_be_converted(tmp_path):
    save_pruned(tmp_path / "pruned")
    make_model("llama").save_pretrained(tmp_path / "plain")
    shutil.copytree(tmp_path / "pruned", tmp_path / "adapted")
    get_peft_model(make_model("llama"), LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path / "adapted")
    save_pruned(tmp_path / "lacking")
    kept = {name: tensor for name, tensor in tensors_of(tmp_path / "lacking").items() if "1.mlp.up_proj" not in name}
    save_file(kept, tmp_path / "lacking" / "model.safetensors", metadata={"format": "pt"})
    for format in ("dense", "packed"):
        save_pruned(tmp_path / f"cut {format}", format=format)
        (file,) = (tmp_path / f"cut {format}").glob("*.safetensors")
        file.write_bytes(file.read_bytes()[:-100])
    shutil.copytree(tmp_path / "pruned", tmp_path / "quantized")
    change_config(tmp_path / "quantized", lambda config: config.update(quantization_config={"quant_method": "gptq"}))
    for folder, format, message in [
        ("plain", "packed", "No weight of .*plain has enough zeros to be smaller packed: prune the model first"),
        ("pruned", "sparse", "format is 'sparse': expected one of 'dense', 'packed'"),
        ("absent", "packed", "is neither a directory nor the id of a model"),
        ("adapted", "packed", "q_proj.weight would be lost: first merge adapters"),
        ("quantized", "packed", "quantized is quantized: convert the checkpoint from before"),
        ("lacking", "packed", "lacks model.layers.1.mlp.up_proj.weight, which would be random"),
        ("cut dense", "packed", "model.* is damaged: .*Download or save it again"),
        ("cut packed", "dense", "packed.* is damaged: .*Download or save it again"),
    ]:
        before = all_files(tmp_path)
        with pytest.raises(ValueError, match=message):
            convert_checkpoint(tmp_path / folder, format, tmp_path / "output")
        assert all_files(tmp_path) == before


def test_a_report_of_a_method_that_this_process_does_not_know(tmp_path):
    save_pruned(tmp_path / "model")
    report = tmp_path / "model" / "neuronal_report.json"
    values = json.loads(report.read_text())
    report.write_text(json.dumps({**values, "method": "mine", "config": {**values["config"], "topup": "mine"}}))
    convert_checkpoint(tmp_path / "model", "packed", tmp_path / "packed")
    card = (tmp_path / "packed" / "README.md").read_text()
    assert "`optimum_neuronal`: mine." in card and "--import the_module_of_mine" in card
