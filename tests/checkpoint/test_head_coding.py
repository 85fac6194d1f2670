"""Saving, loading and converting models whose token embeddings and head have 8 bits."""

import json

import pytest
import torch
from conftest import make_model
from sparse_checkpoints import same
from transformers import AutoModelForCausalLM

from optimum_neuronal import NeuronALConfig, NeuronALPruner, convert_checkpoint, inspect_checkpoint
from optimum_neuronal.checkpoint.packed_reading import open_checkpoint
from optimum_neuronal.checkpoint.save_pretrained import save_packed_by_default
from optimum_neuronal.checkpoint.stored_weights import StoredInt8Weight
from optimum_neuronal.formats.int8_weight import Int8Weight


FILE = "packed-00001-of-00001.safetensors"
FAMILIES = {
    "llama": ({"num_hidden_layers": 1}, {"model.embed_tokens.weight", "lm_head.weight"}),
    "opt": ({"num_hidden_layers": 1}, {"model.decoder.embed_tokens.weight"}),
    "gpt2": ({"n_layer": 1}, {"transformer.wte.weight"}),
    "gemma3_text": ({"num_hidden_layers": 1}, {"model.embed_tokens.weight"}),
    "mixtral": ({"num_hidden_layers": 1, "tie_word_embeddings": True}, {"model.embed_tokens.weight"}),
}


def pruned(family="llama", embedding_bits=8, format="packed", **fields):
    model = make_model(family, **FAMILIES[family][0]).bfloat16()
    config = NeuronALConfig(0.6, saliency="magnitude", topup="uniform", embedding_bits=embedding_bits, **fields)
    pruner = NeuronALPruner(config)
    pruner.prune(model)
    if format == "packed":
        save_packed_by_default(model)
    return pruner, model


def in_8_bits(folder) -> set[str]:
    return {
        name
        for file in open_checkpoint(folder)
        for name, weight in file.weights.items()
        if isinstance(weight, StoredInt8Weight)
    }


@pytest.mark.parametrize("family, value_bits", [*((family, None) for family in FAMILIES), ("llama", 4)])
def test_what_is_saved_is_what_is_in_memory(family, value_bits, tmp_path):
    """And what is loaded, tied as it was; saved again it is the same file."""
    pruner, model = pruned(family, value_bits=value_bits)
    pruner.save(model, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    about = config["sparsity_config"]
    assert config["quantization_config"]["version"] == 3 and about["embedding_bits"] == 8
    assert in_8_bits(tmp_path / "model") == FAMILIES[family][1] == set(about["head_weights"])
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert same(loaded.state_dict(), model.state_dict())
    one, other = loaded.get_input_embeddings().weight, loaded.get_output_embeddings().weight
    assert (one is other) == (len(FAMILIES[family][1]) == 1)
    assert Int8Weight.exact(one) and Int8Weight.exact(other)
    loaded.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / FILE).read_bytes() == (tmp_path / "model" / FILE).read_bytes()
    found = inspect_checkpoint(tmp_path / "model")
    assert not found.problems and "rounded to 8 bits" in str(found) and found.packed_bytes == found.stored_bytes


def test_report_and_card_tell_of_it(tmp_path):
    pruner, model = pruned()
    pruner.save(model, tmp_path / "model")
    errors = pruner.report.head_roundings
    assert errors.keys() == FAMILIES["llama"][1] and all(0 < found["error"] < 1e-4 for found in errors.values())
    worst = max(errors, key=lambda name: errors[name]["error"])
    told = f"{errors[worst]['error']:.4%}"
    assert f"8 bits; squared error of rounding at most {told} ({worst})" in str(pruner.report)
    card = (tmp_path / "model" / "README.md").read_text()
    assert f"head are rounded to 8 bits, with a squared error of at most {told}" in card
    assert "where they belong; of token embeddings and head all, 8 bits each" in card
    assert "embedding_bits=8" in card and "pruned ones, embeddings and head take" in card
    dense = convert_checkpoint(tmp_path / "model", "dense", tmp_path / "dense")
    assert "8 bits each" not in (dense / "README.md").read_text()


def test_without_it_nothing_changes(tmp_path):
    """What is written is what was written before there were such weights."""
    pruner, model = pruned(embedding_bits=None)
    pruner.save(model, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["quantization_config"]["version"] == 3
    assert not {"embedding_bits", "head_weights"} & config["sparsity_config"].keys()
    assert not in_8_bits(tmp_path / "model") and pruner.report.head_roundings == {}
    assert "8 bits" not in (tmp_path / "model" / "README.md").read_text()


def test_what_was_trained_since_is_saved_as_it_is_and_told(tmp_path, caplog):
    pruner, model = pruned()
    pruner.save(model, tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    model.lm_head.weight.data *= 1 + 0.1 * torch.rand_like(model.lm_head.weight)
    model.save_pretrained(tmp_path / "trained")
    assert "not of 8 bits: lm_head.weight. They were changed" in caplog.text
    assert in_8_bits(tmp_path / "trained") == {"model.embed_tokens.weight"}
    assert same(AutoModelForCausalLM.from_pretrained(tmp_path / "trained").state_dict(), model.state_dict())


def test_more_tokens_than_before(tmp_path, caplog):
    """Rows that were added are not of 8 bits: all of the table is stored as it is, and nothing is lost."""
    pruner, model = pruned("opt")
    pruner.save(model, tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    model.resize_token_embeddings(model.config.vocab_size + 3)
    model.save_pretrained(tmp_path / "more")
    assert "not of 8 bits: model.decoder.embed_tokens.weight" in caplog.text
    assert same(AutoModelForCausalLM.from_pretrained(tmp_path / "more").state_dict(), model.state_dict())


def test_a_model_saved_without_its_head(tmp_path):
    """Names then begin otherwise."""
    pruner, model = pruned()
    model.model.save_pretrained(tmp_path / "dense")
    packed = convert_checkpoint(tmp_path / "dense", "packed", tmp_path / "packed")
    assert in_8_bits(packed) == {"embed_tokens.weight"}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_dense_it_is_the_rounded_values_and_packed_again_the_same(family, tmp_path):
    pruner, model = pruned(family)
    pruner.save(model, tmp_path / "model")
    dense = convert_checkpoint(tmp_path / "model", "dense", tmp_path / "dense")
    assert same(AutoModelForCausalLM.from_pretrained(dense).state_dict(), model.state_dict())
    again = convert_checkpoint(dense, "packed", tmp_path / "again")
    assert (again / FILE).read_bytes() == (tmp_path / "model" / FILE).read_bytes()
    assert (again / "config.json").read_text() == (tmp_path / "model" / "config.json").read_text()


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("format", ["dense", "packed"])
def test_converting_rounds_what_was_not_rounded(family, format, tmp_path):
    """The same values as a prune that rounds; all else is what it was."""
    pruner, model = pruned(family, embedding_bits=None, format=format)
    pruner.save(model, tmp_path / "model")
    packed = convert_checkpoint(tmp_path / "model", "packed", tmp_path / "packed", embedding_bits=8)
    assert in_8_bits(packed) == FAMILIES[family][1]
    _, expected = pruned(family)
    assert same(AutoModelForCausalLM.from_pretrained(packed).state_dict(), expected.state_dict())
    about = json.loads((packed / "config.json").read_text())
    assert about["sparsity_config"]["embedding_bits"] == 8 and about["quantization_config"]["version"] == 3
    assert about["sparsity_config"]["head_weights"] == sorted(FAMILIES[family][1])
    with pytest.raises(ValueError, match="is packed already, with a head of 8 bits"):
        convert_checkpoint(packed, "packed", embedding_bits=8)
    if (family, format) == ("llama", "packed"):
        assert in_8_bits(convert_checkpoint(packed, "packed", value_bits=4)) == FAMILIES[family][1]


def test_converting_to_what_does_not_exist_is_refused_and_nothing_is_written(tmp_path):
    pruner, model = pruned(embedding_bits=None, format="dense")
    pruner.save(model, tmp_path / "model")
    for bits, format, message in (
        (4, "packed", "embedding_bits is 4: expected 8"),
        (8, "dense", "embedding_bits is 8, but the format 'dense'"),
    ):
        with pytest.raises(ValueError, match=message):
            convert_checkpoint(tmp_path / "model", format, tmp_path / "new", embedding_bits=bits)
    model.lm_head.weight.data[0, 0] = torch.inf
    pruner.save(model, tmp_path / "model")
    with pytest.raises(ValueError, match="lm_head.weight cannot be rounded to 8 bits: .* NaN or infinite"):
        convert_checkpoint(tmp_path / "model", "packed", tmp_path / "new", embedding_bits=8)
    assert not (tmp_path / "new").exists()
