import copy
import dataclasses

import peft
import pytest
import torch
from conftest import make_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from optimum_neuronal import NeuronALConfig, NeuronALPruner, save_pretrained
from optimum_neuronal.transformers_plugin.pruning_at_load import _revision


@pytest.fixture
def dense(tmp_path, tokenizer):
    """A dense checkpoint with its tokenizer, and text that it can be calibrated with."""
    make_model("llama").save_pretrained(tmp_path / "dense")
    tokenizer.save_pretrained(tmp_path / "dense")
    words = torch.randint(0, 64, (600,), generator=torch.Generator().manual_seed(2)).tolist()
    (tmp_path / "text.txt").write_text(" ".join(f"w{word}" for word in words))
    return tmp_path / "dense"


def config(dense, **fields):
    values = dict(
        topup="uniform", dataset=str(dense.parent / "text.txt"), num_samples=4, num_alignment_samples=2, seq_length=16
    )
    return NeuronALConfig(0.7, **{"saliency": "wanda", **values, **fields})


def test_pruning_at_load_is_pruning(dense):
    """The same bits as from NeuronALPruner, from both of its sides, and the same sparsity_config."""
    cfg = config(dense, topup="neuronal", topup_args={"steps": "block", "block_lambdas": [0.1, 0.2]})
    before = copy.deepcopy(cfg)
    model = AutoModelForCausalLM.from_pretrained(dense, quantization_config=cfg, dtype=torch.bfloat16)
    assert cfg == before
    pruner = NeuronALPruner(cfg)
    by_hand = pruner.prune(AutoModelForCausalLM.from_pretrained(dense, dtype=torch.bfloat16))
    other = NeuronALPruner.from_pretrained(dense, config=cfg, dtype=torch.bfloat16)
    saved = other.quantize(dense.parent / "sparse", save_dtype=torch.bfloat16)  # the checkpoint has float32
    for expected in (by_hand, saved, AutoModelForCausalLM.from_pretrained(dense.parent / "sparse")):
        assert expected.dtype == torch.bfloat16
        for name, value in expected.state_dict().items():
            assert torch.equal(model.state_dict()[name], value), name
        assert model.config.sparsity_config == expected.config.sparsity_config
    assert model.config.sparsity_config["block_lambda"] in (0.1, 0.2)
    assert (model.model.layers[1].mlp.up_proj.weight == 0).float().mean() > 0.5


def test_the_result_is_a_plain_model(dense):
    model = AutoModelForCausalLM.from_pretrained(dense, quantization_config=config(dense))
    plain = AutoModelForCausalLM.from_pretrained(dense)
    assert vars(model).keys() == vars(plain).keys() - {"_weight_conversions"}  # it is saved by the family's names
    assert vars(model.config).keys() - vars(plain.config).keys() == {"sparsity_config"}
    assert not hasattr(model, "is_quantized") and not hasattr(model.config, "_is_quantized")
    save_pretrained(model, dense.parent / "packed", format="packed")
    assert (dense.parent / "packed" / "packed-00001-of-00001.safetensors").exists()
    assert not (dense.parent / "packed" / "model.safetensors").exists()
    assert copy.deepcopy(model).to(torch.float64).dtype == torch.float64
    ids = torch.arange(16)[None]
    model(ids, labels=ids).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    merged = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"])).merge_and_unload()
    torch.optim.SGD(merged.parameters(), 0.1).step()
    merged.save_pretrained(dense.parent / "merged")
    again = AutoModelForCausalLM.from_pretrained(dense.parent / "merged")
    assert torch.equal(again.lm_head.weight, merged.lm_head.weight)


PARTS = ("embed_tokens", "layers.0", "layers.1", "layers.2", "norm", "rotary_emb")
ON_DISK = {f"model.{part}": "cpu" for part in PARTS} | {"lm_head": "cpu", "model.layers.1": "disk"}


@pytest.mark.parametrize("device_map", ["cpu", "auto", ON_DISK])
def test_pruning_at_load_with_a_device_map(dense, device_map):
    """On disk too: such weights are pruned whenever they are read."""
    cfg = config(dense)
    expected = AutoModelForCausalLM.from_pretrained(dense, quantization_config=cfg)
    model = AutoModelForCausalLM.from_pretrained(
        dense, quantization_config=cfg, device_map=device_map, offload_folder=dense.parent / "offload"
    )
    assert model.model.layers[1].mlp.up_proj.weight.is_meta == isinstance(device_map, dict)
    ids = torch.arange(16)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected(ids).logits)


def test_a_sparse_checkpoint_raises(dense):
    """Before its weights are read; without a record, because of its zeros."""
    model = AutoModelForCausalLM.from_pretrained(dense, quantization_config=config(dense))
    sparse = dense.parent / "sparse"
    model.save_pretrained(sparse)
    AutoTokenizer.from_pretrained(dense).save_pretrained(sparse)
    more = dataclasses.replace(config(dense, saliency="magnitude"), sparsity=0.8)
    with pytest.raises(ValueError, match="sparse is already sparse: .* are zero. Prune the dense model"):
        AutoModelForCausalLM.from_pretrained(sparse, quantization_config=more, sparsity_config=None)
    (sparse / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="sparse is already sparse: its config has a sparsity_config"):
        AutoModelForCausalLM.from_pretrained(sparse, quantization_config=more)


def test_mistakes_are_found_before_the_weights_are_read(dense):
    (dense / "model.safetensors").write_bytes(b"\0" * 8)
    for fields, message in (
        (dict(dataset="nowhere.txt"), "nowhere.txt"),
        (dict(dataset=None), "No calibration data"),
        (dict(targets=["no_such_proj"]), "no_such_proj"),
        (dict(seq_length=4096), "4096"),
    ):
        with pytest.raises((ValueError, OSError), match=message):
            AutoModelForCausalLM.from_pretrained(dense, quantization_config=config(dense, **fields))
    for file in dense.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ValueError, match="needs a tokenizer"):
        AutoModelForCausalLM.from_pretrained(dense, quantization_config=config(dense))


def test_a_checkpoint_with_a_pruning_config_raises(dense):
    model = make_model("llama")
    model.config.quantization_config = config(dense).to_dict()
    model.save_pretrained(dense)
    with pytest.raises(ValueError, match="config.json has a NeuronALConfig .* Remove it there"):
        AutoModelForCausalLM.from_pretrained(dense)


def test_the_tokenizer_is_of_the_commit_that_the_weights_are_of():
    for files, revision in (
        (["/cache/hub/models--me--llama/snapshots/3f0a/model.safetensors"], "3f0a"),
        (["/home/me/dense/model.safetensors"], None),
        (None, None),
    ):
        assert _revision(files) == revision
