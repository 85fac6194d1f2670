"""Checkpoints of quantised prunes: card, inspection and conversion; and embeddings and head that are rounded in files."""

import json
import re

import pytest
import torch
from conftest import make_model, make_tokenizer
from few_bits import held
from safetensors.torch import load_file, save_file
from sparse_checkpoints import all_files, change_config, save_pruned, tensors_of
from transformers import AutoModelForCausalLM

from optimum_neuronal import (
    NeuronALConfig,
    NeuronALPruner,
    SparseModelForCausalLM,
    convert_checkpoint,
    densify,
    inspect_checkpoint,
    sparsify,
)
from optimum_neuronal.checkpoint.packed_reading import open_checkpoint
from optimum_neuronal.packed.formats.quantized import QuantizedWeight


FILE = "packed-00001-of-00001.safetensors"
TEXT = "w1 w2 w3 w4 w5 w6 w7 w8 " * 80


@pytest.fixture(scope="module")
def quantised(tmp_path_factory):
    """A pruner, the model that it quantised, and the checkpoint; tests read it alone."""
    folder, model = tmp_path_factory.mktemp("quantised") / "llama-4", make_model("llama", vocab_size=256)
    config = NeuronALConfig(bits_per_weight=4, embedding_bits=8, num_samples=8, seq_length=8)
    pruner = NeuronALPruner(config, make_tokenizer())
    pruner.prune(model, [TEXT])
    pruner.save(model, folder)
    return pruner, model, folder


def bits_of(folder) -> dict[str, int]:
    """Return the bits of every quantised weight in files, by name."""
    weights = {name: weight for file in open_checkpoint(folder) for name, weight in file.weights.items()}
    return {name: weight.read_packed().bits for name, weight in weights.items() if weight.code_bits is not None}


def test_files_and_memory_and_report_agree(quantised):
    pruner, model, folder = quantised
    report, about = pruner.report, json.loads((folder / "config.json").read_text())
    assert about["quantization_config"] == {
        "quant_method": "optimum_neuronal", "format": "packed", "version": 1, "quantized": True
    }  # fmt: skip
    expected = {f"{name}.weight": own["bits"] for name, own in report.projections.items()}
    head = {"model.embed_tokens.weight", "lm_head.weight"}
    assert bits_of(folder) == expected | dict.fromkeys(head, 8)
    assert set(about["sparsity_config"]["head_weights"]) == head and about["sparsity_config"]["embedding_bits"] == 8
    assert about["sparsity_config"]["bits_per_weight"] == report.bits_per_weight <= 4
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert held(loaded) == held(model) and len(held(loaded)) == 23
    ids = torch.arange(16)[None]
    assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_the_card(quantised):
    pruner, _, folder = quantised
    card, report = (folder / "README.md").read_text(), pruner.report
    metadata, body = card.split("---\n")[1], " ".join(card.split("---\n")[2].split())
    assert "- quantized\n- optimum_neuronal\n" in metadata and "pruned" not in metadata
    assert f"projections take {report.bits_per_weight:.2f} bits on average, scales included. It was quantised" in body
    worst = max(found["error"] for found in report.head_roundings.values())
    assert 0 < worst < 1e-3 and f"rounded to 8 bits, with a squared error of at most {worst:.4%}." in body
    assert "Stored are weights of few bits and their scales; token embeddings and head have 8 bits. `import" in body
    packing = pruner._pruned.find(quantised[1]).size
    assert "Packed, the projections, embeddings and head take" in body and packing.in_memory < 0.2 * packing.dense
    assert "zero" not in body and "## Sparsity" not in body and "saliency" not in body
    assert "bits_per_weight=4,\n        embedding_bits=8,\n" in card and "sparsity=" not in card
    code = re.findall(r"```python\n(.*?)```", card, re.S)[-1]
    made = {}
    exec(code[code.index("from optimum") :].partition("model = ")[0] + "config = " + code[code.index("NeuronALConfig(\n") :]
         .partition("\n)\n")[0], made)  # fmt: skip
    config = made["config"].to_dict()
    assert config == {**report.config, "dataset": config["dataset"]}


def test_dense_and_the_card_with_it(quantised, tmp_path):
    """The numbers are those that codes stand for; there is no way back."""
    _, model, folder = quantised
    dense = convert_checkpoint(folder, "dense", tmp_path / "llama-4")
    found = AutoModelForCausalLM.from_pretrained(dense)
    assert not held(found) and "quantization_config" not in json.loads((dense / "config.json").read_text())
    expected = densify(AutoModelForCausalLM.from_pretrained(folder)).state_dict()
    assert all(torch.equal(found.state_dict()[name], value) for name, value in expected.items())
    card = (dense / "README.md").read_text()
    assert "It loads like any other model.\n" in card and "## Size" in card and "import optimum_neuronal\n" not in card
    assert inspect_checkpoint(dense).verdict == "Quantised, but stored dense, so there are no codes to verify."
    with pytest.raises(ValueError, match="was quantised, and is stored dense: its files hold no codes"):
        convert_checkpoint(dense, "packed", tmp_path / "again", embedding_bits=8)


def test_inspection(quantised, tmp_path):
    pruner, _, folder = quantised
    found = inspect_checkpoint(folder)
    assert not found.problems and found.verdict == "Verified: the bits of the codes agree with the sparsity_config."
    assert found.stored_bytes == found.packed_bytes < 0.25 * found.dense_bytes
    assert found.bits_per_weight == pytest.approx(pruner.report.bits_per_weight)
    kinds = json.loads((folder / "config.json").read_text())["sparsity_config"]["projections"]
    assert {kind: share.bits for kind, share in found.kinds.items()} == {
        kind: own["bits"] for kind, own in kinds.items()
    }
    text = re.sub(" +", " ", str(found))
    assert (
        "quantised to 4 bits" in text
        and "projection weights bits recorded bits found" in text
        and "method" not in text
    )
    assert (
        json.loads(json.dumps(found.to_dict()))["kinds"]["mlp.up_proj"]["recorded_bits"]
        == kinds["mlp.up_proj"]["bits"]
    )
    convert_checkpoint(folder, "dense", tmp_path / "other")
    again = sparsify(AutoModelForCausalLM.from_pretrained(tmp_path / "other"), bits=5)
    again.save_pretrained(tmp_path / "other")
    about = json.loads((folder / "config.json").read_text())["sparsity_config"]
    change_config(tmp_path / "other", lambda config: config.update(sparsity_config=about))
    problems = inspect_checkpoint(tmp_path / "other").problems
    assert (
        len(problems) == 7
        and f"mlp.up_proj has codes of 5 bits instead of {kinds['mlp.up_proj']['bits']:.4g}" in problems
    )


HEADS = {
    "llama": {"model.embed_tokens.weight", "lm_head.weight"},
    "gpt2": {"transformer.wte.weight"},
    "opt": {"model.decoder.embed_tokens.weight"},
}


@pytest.mark.parametrize("family", HEADS)
@pytest.mark.parametrize("format", ["dense", "packed"])
def test_converting_rounds_embeddings_and_head(family, format, tmp_path):
    """To the nearest levels; all else is what it was, and the model computes with the codes."""
    save_pruned(tmp_path / "model", family, format=format)
    before, dense = (
        all_files(tmp_path / "model"),
        AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict(),
    )
    packed = convert_checkpoint(tmp_path / "model", "packed", tmp_path / "packed", embedding_bits=8)
    assert bits_of(packed) == dict.fromkeys(HEADS[family], 8) and all_files(tmp_path / "model") == before
    about = json.loads((packed / "config.json").read_text())
    assert about["sparsity_config"]["embedding_bits"] == 8 and about["quantization_config"]["quantized"] is True
    assert about["sparsity_config"]["head_weights"] == sorted(HEADS[family])
    tied = {*HEADS[family], "lm_head.weight"}
    for name, value in densify(SparseModelForCausalLM.from_pretrained(packed)).state_dict().items():
        rounded = QuantizedWeight.nearest(dense[name]).unpack() if name in tied else dense[name]
        assert torch.equal(value, rounded), name
    assert "token embeddings and head have 8 bits" in (packed / "README.md").read_text()
    assert not inspect_checkpoint(packed).problems
    with pytest.raises(ValueError, match="is packed already, with a head of 8 bits"):
        convert_checkpoint(packed, "packed", embedding_bits=8)


def test_converting_a_quantised_checkpoint_rounds_its_head(quantised, tmp_path):
    """Codes of projections stay."""
    model = sparsify(
        AutoModelForCausalLM.from_pretrained(convert_checkpoint(quantised[2], "dense", tmp_path / "m")), bits=3
    )
    model.save_pretrained(tmp_path / "m")
    about = json.loads((quantised[2] / "config.json").read_text())["sparsity_config"]
    about.pop("embedding_bits", None)
    change_config(tmp_path / "m", lambda config: config.update(sparsity_config=about))
    stored = load_file(tmp_path / "m" / FILE)
    convert_checkpoint(tmp_path / "m", "packed", embedding_bits=8)
    found = load_file(tmp_path / "m" / FILE)
    assert set(bits_of(tmp_path / "m").values()) == {3, 8}
    codes = [name for name in stored if ".packed_" in name]
    assert len(codes) == 42 and all(torch.equal(found[name], stored[name]) for name in codes)
    assert found["lm_head.weight.packed_codes"].dtype == torch.int8


def test_a_model_saved_without_its_head(tmp_path):
    """Names then begin otherwise."""
    _, model = save_pruned(tmp_path / "whole", format="packed", embedding_bits=8)
    densify(model).model.save_pretrained(tmp_path / "dense")
    change_config(tmp_path / "dense", lambda config: config["sparsity_config"].pop("embedding_bits"))
    packed = convert_checkpoint(tmp_path / "dense", "packed", tmp_path / "packed", embedding_bits=8)
    assert bits_of(packed) == {"embed_tokens.weight": 8}


def test_what_cannot_be_rounded_is_refused_and_nothing_is_written(tmp_path):
    save_pruned(tmp_path / "model")
    for bits, format, message in (
        (4, "packed", "embedding_bits is 4: expected 8"),
        (8, "dense", "embedding_bits is 8, but the format 'dense'"),
    ):
        with pytest.raises(ValueError, match=message):
            convert_checkpoint(tmp_path / "model", format, tmp_path / "new", embedding_bits=bits)
    tensors = tensors_of(tmp_path / "model")
    tensors["lm_head.weight"][0, 0] = torch.inf
    save_file(tensors, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="lm_head.weight cannot be rounded to 8 bits: .* NaN or infinite"):
        convert_checkpoint(tmp_path / "model", "packed", tmp_path / "new", embedding_bits=8)
    assert not (tmp_path / "new").exists()
