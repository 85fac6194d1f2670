import copy
import json
import math
import re
from pathlib import Path

import pytest
from conftest import make_model
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

from optimum_neuronal import NeuronALConfig, NeuronALPruner
from optimum_neuronal.checkpoint.sparsity_config import load_schema, read_sparsity_config
from optimum_neuronal.model.weight_names import PrunedWeights


def pruned(**fields):
    model = make_model("llama")
    NeuronALPruner(NeuronALConfig(0.7, saliency="magnitude", topup="uniform", **fields)).prune(model)
    return model


@pytest.fixture(scope="module")
def written():
    """What a prune writes, through JSON."""
    return json.loads(json.dumps(pruned().config.sparsity_config))


def test_what_a_prune_writes_is_valid(written):
    assert read_sparsity_config({"sparsity_config": written, "hidden_size": 8}) == written
    of_heads = {"embedding_bits", "head_weights"}  # told where embeddings and head were rounded
    assert set(written) | of_heads == set(load_schema()["properties"]) and not of_heads & set(written), (
        "every key is documented, and every documented one written"
    )
    assert list(written["block_sparsity"]) == [f"model.layers.{index}" for index in range(3)]
    assert len(written["projections"]) == 7 and written["left_out"] == []
    assert written["projections"]["mlp.up_proj"] == {
        "sparsity": pytest.approx(0.7, abs=1e-3), "weights": ["model.layers.*.mlp.up_proj.weight"]
    }  # fmt: skip
    assert len(json.dumps(written)) < 4000


def test_the_models_own_config_is_read():
    model = make_model("llama")
    assert read_sparsity_config(model.config) is None and read_sparsity_config({}) is None
    model = pruned(ignore=["layers.0.*", r"layers\.1\.mlp.up_proj"])
    found = read_sparsity_config(model.config)
    assert list(found["block_sparsity"]) == ["model.layers.1", "model.layers.2"]
    assert found["left_out"] == ["model.layers.1.mlp.up_proj"]


def test_a_mixture_of_experts_is_summed_up():
    """128 experts take no more of config.json than four."""
    model = make_model("qwen3_moe", num_experts=32, moe_intermediate_size=8, num_hidden_layers=1)
    NeuronALPruner(NeuronALConfig(0.5, saliency="magnitude", topup="uniform")).prune(model)
    assert len(model.config.sparsity_config["projections"]) == 6
    assert len(json.dumps(model.config.sparsity_config)) < 4000


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("version", 2, "version is 2: this release of optimum_neuronal reads version 1. Install"),
        ("version", "1", "version is '1': expected a whole number"),
        ("version", True, "version is True: expected a whole number"),
        ("version", 1.0, "version is 1.0: expected a whole number"),
        ("version", None, "version is None: expected a whole number"),
        ("quant_method", "wanda", "quant_method is 'wanda': expected 'neuronal'"),
        ("format", "sparse", "format is 'sparse': expected 'dense' or 'packed'"),
        ("format", ["dense"], "format is a list of 1: expected text"),
        ("sparsity", "0.7", "sparsity is '0.7': expected a number from 0 to 1"),
        ("sparsity", True, "sparsity is True: expected a number from 0 to 1"),
        ("achieved_sparsity", 1.7, "achieved_sparsity is 1.7: expected a number from 0 to 1"),
        ("achieved_sparsity", math.nan, "achieved_sparsity is nan: expected a number"),
        ("achieved_sparsity", 10**60, "achieved_sparsity is a very large number: expected a number from 0 to 1"),
        ("block_sparsity", [0.7], "block_sparsity is a list of 1: expected an object"),
        ("block_sparsity", {"model.layers.0": -0.1}, r"block_sparsity\['model.layers.0'\] is -0.1: expected a number from 0"),
        ("projections", {"q": 0.7}, r"projections\['q'\] is 0.7: expected an object"),
        ("projections", {"q": {"sparsity": 0.7}}, r"projections\['q'\] has no 'weights'"),
        ("projections", {"q": {"sparsity": 0.7, "weights": [1]}}, r"weights\[0\] is 1: expected text"),
        ("left_out", "all", "left_out is 'all': expected a list"),
        ("block_lambda", "x" * 1000, "block_lambda is 'xxx.*\\.\\.\\.: expected a number or null from 0 to 1"),
        ("calibration", {"num_samples": -1}, "num_samples is -1: expected a number, at least 0"),
        ("calibration", {"num_samples": 0.5}, "num_samples is 0.5: expected a whole number"),
        ("config", {"topup": 3}, "config.topup is 3: expected text"),
        ("versions", {"torch": 2}, r"versions\['torch'\] is 2: expected text"),
    ],
)  # fmt: skip
def test_values_that_are_refused(written, key, value, message):
    with pytest.raises(ValueError, match=rf"sparsity_config\..*{message}"):
        read_sparsity_config({"sparsity_config": {**written, key: value}})


@pytest.mark.parametrize("value", [[], "neuronal", 0.7, True, {}])
def test_what_is_no_sparsity_config_at_all(value):
    with pytest.raises(ValueError, match="sparsity_config (is .*: expected an object|has no 'version')"):
        read_sparsity_config({"sparsity_config": value})


def test_a_key_that_is_missing(written):
    for key in load_schema()["required"]:
        with pytest.raises(ValueError, match=f"sparsity_config has no '{key}'"):
            read_sparsity_config({"sparsity_config": {name: value for name, value in written.items() if name != key}})


def test_unknown_keys_are_kept(written):
    with_more = {**written, "notes": {"by": "me"}, "calibration": {"license": "mit"}}
    assert read_sparsity_config({"sparsity_config": with_more}) == with_more


def test_a_wrong_one_is_told_before_a_prune():
    model = make_model("llama")
    model.config.sparsity_config = {"version": 1, "sparsity": 3}
    with pytest.raises(ValueError, match="sparsity_config has no"):
        NeuronALPruner(NeuronALConfig(0.7, saliency="magnitude", topup="uniform")).prune(model)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@examples(60)
@given(data=st.data())
def test_anything_is_either_valid_or_a_value_error(written, data):
    """And what is valid can be used."""
    value = copy.deepcopy(written)
    for _ in range(data.draw(st.integers(1, 3))):
        place, key = value, data.draw(st.sampled_from(sorted(value)))
        while isinstance(place[key], dict) and place[key] and data.draw(st.booleans()):
            place = place[key]
            key = data.draw(st.sampled_from(sorted(place)))
        place[key] = data.draw(JSON)
    try:
        found = read_sparsity_config({"sparsity_config": value})
    except ValueError:
        return
    assert found is value
    name = "model.layers.1.mlp.up_proj.weight"
    stored = PrunedWeights(found, [name]).find(name)
    assert stored is None or stored.block in value["block_sparsity"]


def test_the_documentation_has_every_key():
    text = (Path(__file__).parents[2] / "docs" / "format.md").read_text(encoding="utf-8")
    section = text.partition("## `sparsity_config`")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` ", section, re.M)) == set(load_schema()["properties"])
