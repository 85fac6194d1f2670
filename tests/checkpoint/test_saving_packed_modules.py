"""Saving a model that computes with packed weights: the files are those of the dense model."""

import filecmp
import inspect

import pytest
import torch
from conftest import FEW
from packed_models import assert_same_state, logits, make_zeroed
from profiles import by_day
from safetensors.torch import load_file
from sparse import make_sparse
from transformers import AutoModelForCausalLM

from optimum_neuronal import (
    NeuronALConfig,
    NeuronALPruner,
    SparseModelForCausalLM,
    densify,
    inspect_checkpoint,
    save_pretrained,
    sparsify,
)
from optimum_neuronal.common.display import format_bytes


def same_files(folder, other):
    names = sorted(file.name for file in folder.iterdir())
    assert names == sorted(file.name for file in other.iterdir())
    return filecmp.cmpfiles(folder, other, names, shallow=False) == (names, [], [])


FAMILIES = [*FEW, "qwen3_moe", "gpt_oss", "deepseek_v3", "minimax", "falcon"]


@pytest.mark.parametrize("family", by_day(FAMILIES, "llama", "gpt2", "mixtral", "gpt_oss", "deepseek_v3", "falcon"))
def test_the_same_files(family, tmp_path):
    model = make_zeroed(family)
    save_pretrained(model, tmp_path / "packed", format="packed", max_shard_size=30_000)
    model.save_pretrained(tmp_path / "dense")
    state = {name: value.clone() for name, value in model.state_dict().items()}
    sparsify(model)
    model.save_pretrained(tmp_path / "again", max_shard_size=30_000)
    assert same_files(tmp_path / "again", tmp_path / "packed")
    model.save_pretrained(tmp_path / "unpacked", format="dense", max_shard_size=10**9)
    expected = load_file(tmp_path / "dense" / "model.safetensors")
    found = load_file(tmp_path / "unpacked" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    plain = {file.name for file in (tmp_path / "dense").iterdir()}
    assert {file.name for file in (tmp_path / "unpacked").iterdir()} == plain
    model.save_pretrained(tmp_path / "shards", format="dense", max_shard_size=20_000)
    assert len(list((tmp_path / "shards").glob("model-*.safetensors"))) > 1
    assert_same_state(AutoModelForCausalLM.from_pretrained(tmp_path / "shards"), state)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_converted_meanwhile(dtype, tmp_path):
    """Values that have become zero are none any more; and what packing does not make smaller now is stored as it is."""
    model = make_zeroed()
    weight, barely = model.model.layers[0].mlp.up_proj.weight, model.model.layers[1].mlp.up_proj.weight
    weight.data[0, :8] = 1e-30
    barely.data.normal_()
    barely.data[torch.rand_like(barely) < 0.35] = 0
    sparsify(model).to(dtype)
    model.save_pretrained(tmp_path / "packed")
    save_pretrained(densify(model), tmp_path / "expected", format="packed")
    assert same_files(tmp_path / "packed", tmp_path / "expected")


@pytest.mark.parametrize("format", ["packed", "dense"])
def test_a_module_in_two_places_is_saved_under_both_names(format, tmp_path, ids):
    model = sparsify(make_zeroed()).eval()
    model.model.layers[1].mlp = model.model.layers[0].mlp
    model.save_pretrained(tmp_path, format=format)
    assert inspect_checkpoint(tmp_path).problems == []
    reloaded = SparseModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(logits(reloaded, ids), logits(model, ids))


def test_over_the_files_that_it_was_loaded_from(tmp_path):
    model = make_sparse("llama")
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.save_pretrained(tmp_path)
    for format in ("packed", "dense", "dense", "packed", "packed"):
        loaded = SparseModelForCausalLM.from_pretrained(tmp_path)
        loaded.save_pretrained(tmp_path, format=format)
        assert inspect_checkpoint(tmp_path).format == format
        assert_same_state(AutoModelForCausalLM.from_pretrained(tmp_path), state)


def test_by_the_pruner(tmp_path):
    """With report and card; whichever format its config asks for, the model's own way to save goes first."""
    from conftest import make_model

    model, pruner = make_model("mixtral"), NeuronALPruner(NeuronALConfig(0.7, saliency="magnitude", topup="uniform"))
    pruner.prune(model)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    pruner.save(sparsify(model), tmp_path)
    packing = model.packing
    told = f"{format_bytes(packing.packed_bytes)} of memory instead of {format_bytes(packing.dense_bytes)}"
    assert told in (tmp_path / "README.md").read_text(encoding="utf-8")
    inspection = inspect_checkpoint(tmp_path)
    assert inspection.format == "packed" and not inspection.problems and (tmp_path / "neuronal_report.json").exists()
    assert_same_state(AutoModelForCausalLM.from_pretrained(tmp_path), state)


def test_arguments(tmp_path):
    model = sparsify(make_zeroed())
    plain = inspect.signature(make_zeroed().save_pretrained)
    assert list(inspect.signature(model.save_pretrained).parameters) == list(plain.parameters)
    with pytest.raises(ValueError, match="with packed weights: leave it out"):
        model.save_pretrained(tmp_path, state_dict=model.state_dict())
    for format in ("dense", "packed"):
        with pytest.raises(ValueError, match="has no packed format: call push_to_hub"):
            model.save_pretrained(tmp_path, format=format, push_to_hub=True)
        model.save_pretrained(tmp_path, is_main_process=False, format=format)
    assert not any(tmp_path.glob("*.safetensors"))
