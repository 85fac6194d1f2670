"""What lies beside the weights of a checkpoint goes along with them, and transformers 4 reads it too."""

import copy
import json

import pytest
from conftest import make_model, make_tokenizer
from obstacles import fill
from sparse_checkpoints import all_files
from texts import MIXED
from transformers import AutoConfig, AutoTokenizer

from optimum_neuronal import NeuronALConfig, NeuronALPruner, convert_checkpoint, save_pretrained
from optimum_neuronal.checkpoint.carrying import carry_over
from optimum_neuronal.data.sample_text import sample_text
from optimum_neuronal.evaluation.answers import answer
from optimum_neuronal.model.load_model import load_model
from optimum_neuronal.model.origin import checkpoint_folder, own_tokenizer


CONFIG = NeuronALConfig(0.5, saliency="wanda", topup="uniform", num_samples=4, seq_length=8)
BESIDE = (
    "LICENSE", "modules.json", "config_sentence_transformers.json", "sentence_bert_config.json", "1_Pooling/config.json",
    "2_Dense/pytorch_model.bin", "modeling_own.py", "custom_generate/generate.py", "preprocessor_config.json",
)  # fmt: skip
OTHERS = ("notes.txt", "onnx/model.onnx", ".git/config", "pytorch_model.bin", "1_run/model.safetensors", "venv/a.py")


def test_files_that_give_the_weights_their_meaning_go_along(tmp_path):
    source, pruned, packed, saved = (tmp_path / name for name in ("source", "pruned", "packed", "saved"))
    make_model("llama").save_pretrained(source)
    fill(source, dict.fromkeys((*BESIDE, *OTHERS), "mine"))
    NeuronALPruner.from_pretrained(source, config=CONFIG).quantize(pruned, dataset=[[1] * 8] * 4)
    convert_checkpoint(pruned, "packed", packed)
    save_pretrained(load_model(packed), saved)
    for folder in (pruned, packed, saved):
        assert {name for name, content in all_files(folder).items() if content == b"mine"} == {*BESIDE}, folder


def test_they_come_from_the_models_own_revision_and_replace_none(tmp_path):
    """The tokenizer does too. Files in the Hub's cache are links."""
    repository = tmp_path / "models--me--llama"
    for branch in ("main", "trial"):
        snapshot = repository / "snapshots" / branch
        make_model("llama", vocab_size=256).save_pretrained(snapshot)
        make_tokenizer(eos_token="w1" if branch == "main" else "w2").save_pretrained(snapshot)
        fill(repository, {f"blobs/{branch}": branch, f"refs/{branch}": branch})
        (snapshot / "modules.json").symlink_to(f"../../blobs/{branch}")
        (snapshot / "processor_config.json").symlink_to(f"../../blobs/{branch}")
    fill(tmp_path / "saved", {"processor_config.json": "mine"})
    model = load_model("me/llama", revision="trial", cache_dir=tmp_path, local_files_only=True)
    carry_over(model, tmp_path / "saved")
    assert all_files(tmp_path / "saved") == {"modules.json": b"trial", "processor_config.json": b"mine"}
    assert checkpoint_folder(model, local_files_only=True) == repository / "snapshots" / "trial"
    assert own_tokenizer(model).eos_token == "w2"


@pytest.mark.parametrize("changed", [False, True])
def test_an_unchanged_tokenizer_keeps_its_own_files(changed, tmp_path):
    """Tokenizing takes neither truncation nor padding out of it. transformers 4 reads it, changed or not."""
    make_model("llama", vocab_size=256).save_pretrained(tmp_path / "source")
    tokenizer = make_tokenizer(pad_token="w3", extra_special_tokens=["w5"])
    tokenizer.backend_tokenizer.enable_truncation(6)
    tokenizer.backend_tokenizer.enable_padding(length=6, pad_token="w3", pad_id=3)
    tokenizer.save_pretrained(tmp_path / "source")
    config = json.loads((tmp_path / "source" / "tokenizer_config.json").read_text())
    config["chat_template"] = "{{ messages }}"
    fill(tmp_path / "source", {"tokenizer.model": "mine", "tokenizer_config.json": json.dumps(config)})
    pruner = NeuronALPruner.from_pretrained(tmp_path / "source", config=CONFIG)
    if changed:
        pruner.tokenizer.add_tokens("new")
    pruner.quantize(tmp_path / "saved", dataset=MIXED, evaluate={"text": MIXED})
    assert answer(pruner.model, pruner.tokenizer, "w1", 1)
    assert [*sample_text(pruner.model, pruner.tokenizer, 1, max_new_tokens=9)]
    before, after = all_files(tmp_path / "source"), all_files(tmp_path / "saved")
    backend, config = pruner.tokenizer.backend_tokenizer, json.loads(after["tokenizer_config.json"])
    assert backend.truncation["max_length"] == backend.padding["length"] == 6
    assert [before[name] == after.get(name) for name in ("tokenizer.json", "tokenizer.model")] == 2 * [not changed]
    assert b"apply_chat_template" in after["README.md"]
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast" and config["additional_special_tokens"] == ["w5"]
    assert "extra_special_tokens" not in config, "transformers 4 fails at a list"
    again = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert again.all_special_tokens == tokenizer.all_special_tokens and len(again) == len(pruner.tokenizer)


SCALED = {"rope_type": "linear", "factor": 8.0}
FACTORS = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
LONG = {"rope_type": "longrope", "rope_theta": 5e5, **FACTORS}
PART = {"rope_theta": 5e5, "partial_rotary_factor": 0.5}
BY_LAYER = {"full_attention": {**SCALED, "rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e3}}


@pytest.mark.parametrize(
    ("family", "rope", "older"),
    [
        ("llama", {"rope_theta": 5e5}, {"rope_theta": 5e5}),
        ("llama", {**SCALED, "rope_theta": 5e5}, {"rope_theta": 5e5, "rope_scaling": SCALED}),
        ("phi3", LONG, {"rope_theta": 5e5, "rope_scaling": {"type": "longrope", **FACTORS}}),
        ("gpt_neox", PART, {"rotary_emb_base": 5e5, "rotary_pct": 0.5}),
        ("gemma3_text", BY_LAYER, {"rope_theta": 1e6, "rope_local_base_freq": 1e3, "rope_scaling": SCALED}),
    ],
)
def test_transformers_4_finds_the_rotary_embeddings(family, rope, older, tmp_path):
    """By the names that it had for them. Version 5 reads the config as before."""
    model = make_model(family, rope_parameters=copy.deepcopy(rope))
    save_pretrained(model, tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written | older == written
    assert AutoConfig.from_pretrained(tmp_path).rope_parameters.items() >= model.config.rope_parameters.items()
