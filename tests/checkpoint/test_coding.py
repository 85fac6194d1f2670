"""Saving and converting models whose values were rounded to few bits."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from conftest import make_model
from sparse_checkpoints import change_config, same, save_pruned, tensors_of
from transformers import AutoModelForCausalLM

from optimum_neuronal import (
    NeuronALConfig,
    NeuronALPruner,
    SparseModelForCausalLM,
    convert_checkpoint,
    densify,
    inspect_checkpoint,
    save_pretrained,
    sparsify,
)
from optimum_neuronal.checkpoint.packed_reading import open_checkpoint
from optimum_neuronal.checkpoint.save_pretrained import save_packed_by_default


FAMILIES = {
    "llama": {"num_hidden_layers": 1},
    "gpt2": {"n_layer": 1},
    "mixtral": {"num_hidden_layers": 1, "num_local_experts": 2},
    "gpt_oss": {"num_hidden_layers": 1, "num_local_experts": 2},
}
CONFIG = NeuronALConfig(0.6, saliency="magnitude", topup="uniform")
_PRUNED: dict[tuple, tuple] = {}  # made by `pruned` in this session: rounding takes longest


def pruned(family="llama", bits=4, format="packed"):
    """A small pruned model with quantised values, and its pruner; made once, and copied."""
    if (family, bits) not in _PRUNED:
        pruner = NeuronALPruner(replace(CONFIG, value_bits=bits))
        _PRUNED[family, bits] = pruner, pruner.prune(make_model(family, **FAMILIES[family]).bfloat16())
    pruner, model = _PRUNED[family, bits][0], copy.deepcopy(_PRUNED[family, bits][1])
    if format == "packed":
        save_packed_by_default(model)
    return pruner, model


def coded(folder):
    """The coded weights in a directory, by name."""
    return {name: w for file in open_checkpoint(folder) for name, w in file.weights.items() if hasattr(w, "bits")}


@pytest.mark.parametrize("family, bits", [("llama", 3), ("gpt2", 8), ("mixtral", 2), ("gpt_oss", 4)])
def test_what_is_saved_is_what_is_in_memory(family, bits, tmp_path):
    """And what is loaded, dense or packed; all projections are coded, and nothing else is."""
    pruner, model = pruned(family, bits)
    pruner.save(model, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["quantization_config"]["version"] == 3 and config["sparsity_config"]["value_bits"] == bits
    expected = model.state_dict()
    assert same(AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict(), expected)
    found = coded(tmp_path / "model")
    counted = inspect_checkpoint(tmp_path / "model")
    assert sum(torch.Size(weight.shape).numel() for weight in found.values()) == counted.total.weights
    assert {weight.bits for weight in found.values()} == {bits} and not counted.problems
    assert not any("embed" in name or "norm" in name or "wte" in name or "router" in name for name in found)
    transposed = {"gpt2": "", "gpt_oss": "experts"}.get(family, "none")
    assert all(weight.transposed == (transposed in name) for name, weight in found.items())
    sparse = SparseModelForCausalLM.from_pretrained(tmp_path / "model")
    assert same(densify(sparse).state_dict(), expected)


def test_a_loaded_model_is_saved_the_same_again(tmp_path):
    pruner, model = pruned()
    pruner.save(model, tmp_path / "one")
    for number, loader in enumerate((AutoModelForCausalLM, SparseModelForCausalLM)):
        loader.from_pretrained(tmp_path / "one").save_pretrained(tmp_path / str(number), format="packed")
        for name in ("packed-00001-of-00001.safetensors", "packed.safetensors.index.json"):
            assert (tmp_path / "one" / name).read_bytes() == (tmp_path / str(number) / name).read_bytes()
        stored = [json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("one", str(number))]
        assert stored[0]["quantization_config"] == stored[1]["quantization_config"]


@pytest.mark.parametrize("family", FAMILIES)
def test_rounded_values_saved_dense_become_codes_and_again_dense(family, tmp_path):
    pruner, model = pruned(family, 4, "dense")
    pruner.save(model, tmp_path / "dense")
    assert "quantization_config" not in json.loads((tmp_path / "dense" / "config.json").read_text())
    packed = convert_checkpoint(tmp_path / "dense", "packed", tmp_path / "packed")
    found = coded(packed)
    assert (
        sum(torch.Size(weight.shape).numel() for weight in found.values()) == inspect_checkpoint(packed).total.weights
    )
    again = convert_checkpoint(packed, "dense", tmp_path / "again")
    assert same(tensors_of(tmp_path / "dense"), tensors_of(again))
    assert (again / "config.json").read_text() == (tmp_path / "dense" / "config.json").read_text()


@pytest.mark.parametrize("family", FAMILIES)
def test_converting_rounds_what_was_not_rounded(family, tmp_path):
    """The same values as a prune that rounds, and what is loaded is what a dense copy has."""
    save_pruned(tmp_path / "model", family, overrides=FAMILIES[family], dtype=torch.bfloat16)
    packed = convert_checkpoint(tmp_path / "model", "packed", tmp_path / "packed", value_bits=4)
    config = json.loads((packed / "config.json").read_text())
    assert config["quantization_config"]["version"] == 3 and config["sparsity_config"]["value_bits"] == 4
    dense = convert_checkpoint(packed, "dense", tmp_path / "dense")
    loaded = AutoModelForCausalLM.from_pretrained(packed).state_dict()
    assert same(loaded, AutoModelForCausalLM.from_pretrained(dense).state_dict())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    before = model.state_dict()
    assert all(torch.equal(value != 0, before[name] != 0) for name, value in loaded.items())
    changed = {name for name, value in loaded.items() if not torch.equal(value, before[name])}
    assert changed and not any("embed" in name or "norm" in name for name in changed)
    assert "4 bits each" in (packed / "README.md").read_text()


def test_a_packed_checkpoint_can_be_rounded_in_place_and_to_other_bits(tmp_path):
    save_pruned(tmp_path / "model", overrides=FAMILIES["llama"])
    convert_checkpoint(tmp_path / "model", "packed")
    sizes = [inspect_checkpoint(tmp_path / "model").bits_per_weight]
    for bits in (8, 2):
        convert_checkpoint(tmp_path / "model", "packed", value_bits=bits)
        sizes.append(inspect_checkpoint(tmp_path / "model").bits_per_weight)
        assert {weight.bits for weight in coded(tmp_path / "model").values()} == {bits}
        with pytest.raises(ValueError, match=f"is packed already, with values of {bits} bits"):
            convert_checkpoint(tmp_path / "model", "packed", value_bits=bits)
    assert sizes == sorted(sizes, reverse=True)
    assert f"{sizes[-1]:.2f} in pruned projections" in str(inspect_checkpoint(tmp_path / "model"))


def test_bits_that_nothing_has_are_refused_and_nothing_is_written(tmp_path):
    save_pruned(tmp_path / "model", overrides=FAMILIES["llama"])
    for bits, error in [
        (5, ValueError),
        (1, ValueError),
        (16, ValueError),
        (True, TypeError),
        ("4", TypeError),
        (4.0, TypeError),
    ]:
        with pytest.raises(error, match="expected one of 8, 4, 3, 2"):
            convert_checkpoint(tmp_path / "model", "packed", tmp_path / "new", value_bits=bits)
    with pytest.raises(ValueError, match="value_bits is 4, but the format 'dense': convert to 'packed'"):
        convert_checkpoint(tmp_path / "model", "dense", tmp_path / "new", value_bits=4)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), torch.float64])
def test_values_that_cannot_be_rounded_are_refused_and_nothing_is_written(bad, tmp_path):
    _, model = save_pruned(tmp_path / "model", overrides=FAMILIES["llama"])
    message = "up_proj.weight has NaN or infinite values"
    if isinstance(bad, torch.dtype):
        model, message = model.to(bad), "has the dtype torch.float64"
    else:
        model.model.layers[0].mlp.up_proj.weight.data[0, 0] = bad
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=message):
        convert_checkpoint(tmp_path / "model", "packed", tmp_path / "new", value_bits=4)
    assert not (tmp_path / "new").exists()


def test_what_was_trained_since_is_saved_as_it_is_and_told(tmp_path, caplog):
    """Saving never changes a value: the weights that are still of few bits are coded, the others are not."""
    pruner, model = pruned()
    pruner.save(model, tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    weight = model.model.layers[0].mlp.up_proj.weight
    loss = model(torch.arange(12)[None], labels=torch.arange(12)[None]).loss
    loss.backward()
    with torch.no_grad():
        weight -= 0.1 * weight.grad * (weight != 0)
    model.save_pretrained(tmp_path / "trained")
    assert (
        "1 pruned weights, such as model.layers.0.mlp.up_proj.weight, are saved with values as they are" in caplog.text
    )
    assert same(AutoModelForCausalLM.from_pretrained(tmp_path / "trained").state_dict(), model.state_dict())
    before = coded(tmp_path / "model").keys()
    assert before - coded(tmp_path / "trained").keys() == {"model.layers.0.mlp.up_proj.weight"}
    caplog.clear()
    convert_checkpoint(tmp_path / "trained", "dense", tmp_path / "dense")
    packed = convert_checkpoint(tmp_path / "dense", "packed", tmp_path / "again", value_bits=4)
    assert coded(packed).keys() == before and not caplog.text


def test_experts_of_which_some_were_left_out_are_stored_as_they_are(tmp_path, caplog):
    model = make_model("gpt_oss", **FAMILIES["gpt_oss"]).bfloat16()
    pruner = NeuronALPruner(replace(CONFIG, value_bits=4, ignore=[r"experts\.1\."]))
    pruner.save(pruner.prune(model), tmp_path / "model", "packed")
    assert not any("experts" in name for name in coded(tmp_path / "model")) and coded(tmp_path / "model")
    assert "some of their experts were not pruned" in caplog.text
    assert same(AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict(), model.state_dict())


def test_save_pretrained_codes_a_model_of_another_make(tmp_path):
    """Told by its sparsity_config alone; a bad one is refused as everywhere."""
    pruner, model = pruned(format="dense")
    pruner.save(model, tmp_path / "dense")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
    save_pretrained(loaded, tmp_path / "packed", format="packed")
    assert coded(tmp_path / "packed")
    change_config(tmp_path / "dense", lambda config: config["sparsity_config"].update(value_bits=7))
    for use in (inspect_checkpoint, lambda folder: convert_checkpoint(folder, "packed", tmp_path / "new")):
        with pytest.raises(ValueError, match="value_bits is 7: expected"):
            use(tmp_path / "dense")


@pytest.mark.parametrize("offloaded", ["cpu_offload", "disk_offload"])
def test_an_offloaded_model_is_rounded_and_saved_the_same(offloaded, tmp_path):
    import accelerate

    _, expected = pruned()
    model = make_model("llama", **FAMILIES["llama"]).bfloat16()
    if offloaded == "cpu_offload":
        accelerate.cpu_offload(model, torch.device("cpu"))
    else:
        accelerate.disk_offload(model, tmp_path / "weights", torch.device("cpu"))
    pruner = NeuronALPruner(replace(CONFIG, value_bits=4))
    pruner.save(pruner.prune(model), tmp_path / "model", "packed")
    assert coded(tmp_path / "model")
    assert same(AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict(), expected.state_dict())


def test_codes_whose_scales_another_dtype_has_not_are_saved_in_their_own(tmp_path, caplog):
    """In float16 the scales of very small weights would be refused when they are read: files have them as bfloat16's."""
    model = make_model("llama", **FAMILIES["llama"]).bfloat16()
    small = model.model.layers[0].self_attn
    with torch.no_grad():
        small.q_proj.weight.mul_(1e-5)
    NeuronALPruner(replace(CONFIG, value_bits=4)).prune(model)
    sparsify(model, value_bits=4).half().save_pretrained(tmp_path)
    assert "saved with values as they are" not in caplog.text
    loaded = SparseModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded.model.layers[0].self_attn.q_proj.dense(), small.q_proj.dense())
    assert loaded.dtype == torch.float16
