import json

import pytest
from conftest import make_model

from optimum_neuronal import NeuronALConfig, NeuronALPruner
from optimum_neuronal.model.weight_names import PrunedWeights, StoredProjection, natural_order


def sparsity_config(blocks, projections, left_out=()):
    kinds = {kind: {"sparsity": 0.5, "weights": weights} for kind, weights in projections.items()}
    return {"block_sparsity": dict.fromkeys(blocks, 0.5), "projections": kinds, "left_out": list(left_out)}


@pytest.fixture(scope="module")
def written():
    """What a prune writes, through JSON."""
    model = make_model("llama")
    NeuronALPruner(NeuronALConfig(0.7, saliency="magnitude", topup="uniform")).prune(model)
    return json.loads(json.dumps(model.config.sparsity_config))


def test_natural_order():
    names = ["layers.10.b", "layers.2.b", "layers.2.a", "embed", "layers.x"]
    assert sorted(names, key=natural_order) == ["embed", "layers.x", "layers.2.a", "layers.2.b", "layers.10.b"]


def test_names_that_begin_otherwise(written):
    """Without the head, a model's names lack the first part; wrapped, they have more."""
    for name in (
        "model.layers.1.mlp.up_proj.weight",
        "layers.1.mlp.up_proj.weight",
        "m.model.layers.1.mlp.up_proj.weight",
    ):
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
