import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from by_hand import make_block
from conftest import make_model, make_model_on_disk

from optimum_neuronal import NeuronALConfig, NeuronALPruner
from optimum_neuronal.model.change import NewWeight, Zeros, packed_bytes
from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.model.projections import Block
from optimum_neuronal.model.sparsity import (
    PrunedWeights,
    StoredProjection,
    measure_sparsity,
    natural_order,
    packed_size,
    read_sparsity_config,
)


def pruned(family="llama", sparsity=0.7, fields=None, **overrides):
    model = make_model(family, **overrides)
    config = NeuronALConfig(sparsity, saliency="magnitude", topup="uniform", **(fields or {}))
    return NeuronALPruner(config).prune(model)


@pytest.fixture(scope="module")
def written():
    """What a pruning run writes, through JSON."""
    return json.loads(json.dumps(pruned().config.sparsity_config))


def test_what_a_prune_writes_is_valid_and_documented(written):
    assert read_sparsity_config({"sparsity_config": written, "hidden_size": 8}) == written
    assert list(written["block_sparsity"]) == [f"model.layers.{index}" for index in range(3)]
    assert len(written["projections"]) == 7 and written["left_out"] == []
    assert written["projections"]["mlp.up_proj"] == {
        "sparsity": pytest.approx(0.7, abs=1e-3), "numel": 3 * 48 * 32, "weights": ["model.layers.*.mlp.up_proj.weight"]
    }  # fmt: skip
    text = (Path(__file__).parents[2] / "docs" / "format.md").read_text(encoding="utf-8")
    section = text.partition("## `sparsity_config`")[2].partition("\n## ")[0]
    documented = set(re.findall(r"^\| `(\w+)` ", section, re.M))
    assert documented == written.keys()


def test_the_models_own_config_is_read():
    model = make_model("llama")
    assert read_sparsity_config(model.config) is None and read_sparsity_config({}) is None
    found = read_sparsity_config(pruned(fields={"ignore": ["layers.0.*", r"layers\.1\.mlp.up_proj"]}).config)
    assert list(found["block_sparsity"]) == ["model.layers.1", "model.layers.2"]
    assert found["left_out"] == ["model.layers.1.mlp.up_proj"]


def test_experts_are_summed_up():
    """128 experts take no more of config.json than four."""
    model = pruned("qwen3_moe", 0.5, num_experts=32, moe_intermediate_size=8, num_hidden_layers=1)
    assert len(model.config.sparsity_config["projections"]) == 6
    assert len(json.dumps(model.config.sparsity_config)) < 4000


@pytest.mark.parametrize(
    "value",
    [
        {"version": 2}, {"version": True}, {"version": 1.0}, {"version": None}, {"sparsity": None}, {"block_sparsity": [0.7]},
        {"projections": "q"}, {"projections": {"q": {"sparsity": []}}}, {"projections": {"q": 0.7}},
        {"block_sparsity": {"b": None}}, {"block_sparsity": {f"layers.{number}": 0.5 for number in range(50_000)}},
        {"projections": {f"q{number}": {"sparsity": 0.5, "weights": ["q"]} for number in range(50_000)}},
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_what_cannot_be_read_raises(written, value):
    with pytest.raises(ValueError, match="sparsity_config"):
        read_sparsity_config({"sparsity_config": written | value})


@pytest.mark.parametrize(
    "value", [[], "neuronal", {}, {"version": 1}, {"format": "sparse-bitmask", "\n": "\x1b"}], ids=str
)
def test_that_of_another_tool_is_ignored_with_a_line(value, caplog):
    assert read_sparsity_config({"sparsity_config": value}) is None
    (record,) = caplog.records
    assert "of another tool is ignored: " in record.getMessage() and record.getMessage().isprintable()


def sparsity_config(blocks, projections, left_out=()):
    kinds = {kind: {"sparsity": 0.5, "weights": weights} for kind, weights in projections.items()}
    return {"block_sparsity": dict.fromkeys(blocks, 0.5), "projections": kinds, "left_out": list(left_out)}


def test_natural_order():
    names = ["layers.10.b", "layers.2.b", "layers.2.a", "embed", "layers.x"]
    assert sorted(names, key=natural_order) == ["embed", "layers.x", "layers.2.a", "layers.2.b", "layers.10.b"]


def test_names_that_begin_otherwise(written):
    """Without the head, a model's names lack the first part; wrapped, they have more."""
    for beginning in ("model.", "", "m.model."):
        name = f"{beginning}layers.1.mlp.up_proj.weight"
        names = [name, name.replace("mlp.up_proj", "input_layernorm")]
        places = [PrunedWeights(written).find(name) for name in names]
        assert (places[0].block, places[0].kind, places[1]) == ("model.layers.1", "mlp.up_proj", None)
    assert PrunedWeights(written).find("model.layers.7.mlp.up_proj.weight") is None


def test_all_experts_in_one_weight_tell_who_was_left_out():
    kinds = {"mlp.experts.*.down": ["h.*.mlp.experts.down"]}
    config = sparsity_config(["h.0", "h.1"], kinds, left_out=["h.1.mlp.experts.3.down", "h.1.mlp.experts.10.down"])
    weights = PrunedWeights(config)
    assert weights.find("h.0.mlp.experts.down") == StoredProjection("h.0", "mlp.experts.*.down")
    assert weights.find("h.1.mlp.experts.down").left_out == {"3", "10"}


def test_experts_one_by_one():
    kinds = {"mlp.experts.*.down": ["h.*.mlp.experts.*.w2.weight"]}
    config = sparsity_config(["h.0"], kinds, left_out=["h.0.mlp.experts.3.down"])
    names = ["h.0.mlp.experts.2.w2.weight", "h.0.mlp.experts.3.w2.weight"]
    found = [PrunedWeights(config).find(name) for name in names]
    assert found == [StoredProjection("h.0", "mlp.experts.*.down"), None]


def measured(*blocks, changes=None):
    return measure_sparsity(SimpleNamespace(blocks=blocks), changes)


def test_zeros_are_counted_by_projection_by_block_and_on_the_whole():
    """3 of 4, 0 of 2 and 1 of 4 weights; a block without pruned projections is left out."""
    first = make_block([[0.0, 0.0], [0.0, 1.0]], [[1.0], [2.0]], name="first")
    last = make_block([[0.0, -1.0, 5.0, 2.0]], name="last")
    whole, blocks, projections = measured(first, Block("left out", first.module, {}), last)
    assert whole == pytest.approx(4 / 10) and blocks == {"first": 3 / 6, "last": 1 / 4}
    assert projections == {
        "first.0": {"sparsity": 0.75, "smallest_row": 0.5, "largest_row": 1.0},
        "first.1": {"sparsity": 0.0, "smallest_row": 0.0, "largest_row": 0.0},
        "last.0": {"sparsity": 0.25, "smallest_row": 0.25, "largest_row": 0.25},
    }


def test_what_weights_will_be_is_counted_before_they_are():
    block = make_block([[0.0, 2.0], [3.0, 4.0]], [[1.0], [2.0]])
    zeros, update = Zeros(torch.tensor([[True, False], [False, True]])), NewWeight(torch.tensor([[0.0], [7.0]]))
    whole, blocks, projections = measured(block, changes={"block.0": zeros, "block.1": update})
    assert whole == blocks["block"] == pytest.approx(4 / 6)
    assert projections["block.0"] == {"sparsity": 0.75, "smallest_row": 0.5, "largest_row": 1.0}
    assert [p.weight.tolist() for p in block.pruned] == [[[0.0, 2.0], [3.0, 4.0]], [[1.0], [2.0]]]


def test_transposed_weights_are_packed_by_outputs():
    decoder = find_decoder(make_model("gpt2", n_embd=40, n_inner=72))
    size = packed_size(decoder, lambda p: p.numel // 2)
    assert size.saved == sum(packed_bytes(p.shape, p.numel - p.numel // 2, 4) for p in decoder.projections.values())


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_offloaded_weights_are_read(family, tmp_path):
    assert measure_sparsity(find_decoder(make_model_on_disk(tmp_path, family))) == measure_sparsity(
        find_decoder(make_model(family))
    )
