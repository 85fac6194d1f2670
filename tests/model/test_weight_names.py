import json
import math

import pytest
import torch
from conftest import make_model
from sparse_checkpoints import tensors_of
from transformers import AutoModel

from optimum_neuronal import NeuronALConfig, NeuronALPruner
from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.model.projections import every_projection, kind_of, stored_names, token_weights, with_stars
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


def test_kinds_are_what_blocks_and_experts_have_in_common():
    decoder = find_decoder(make_model("mixtral"), ignore=["q_proj"])
    projections = list(every_projection(decoder))
    kinds = {kind_of(block, projection) for block, projection in projections}
    assert {"self_attn.q_proj", "self_attn.o_proj", "mlp.experts.*.down_proj"} < kinds, "pruned or not"
    assert len(projections) == sum(len(block.projections) for block in decoder.blocks)


@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt2", "gpt_oss", "gemma3", "nemotron_h", "granitemoe"])
def test_names_are_those_of_the_files(family, tmp_path):
    model = make_model(family)
    model.save_pretrained(tmp_path)
    decoder = find_decoder(model)
    recorded = [name for names in stored_names(model, decoder).values() for name in names]
    stored = tensors_of(tmp_path)
    assert set(recorded) <= {with_stars(name) for name in stored} and len(recorded) == len(set(recorded))
    size = sum(tensor.numel() for name, tensor in stored.items() if with_stars(name) in recorded)
    assert size == sum(math.prod(projection.shape) for projection in decoder.projections.values())


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


def test_by_their_names_in_the_files():
    for family, overrides, expected in (
        ("llama", {}, ["model.embed_tokens.weight", "lm_head.weight"]),
        ("llama", {"tie_word_embeddings": True}, ["model.embed_tokens.weight"]),
        ("gpt2", {}, ["transformer.wte.weight"]),
        ("mixtral", {}, ["lm_head.weight", "model.embed_tokens.weight"]),
        ("gemma3_text", {}, ["model.embed_tokens.weight"]),
    ):
        model = make_model(family, **overrides)
        found = token_weights(model)
        assert sorted(found) == sorted(expected) and any(
            weight is model.get_input_embeddings().weight for weight in found.values()
        )
        with torch.device("meta"):
            assert token_weights(type(model)(model.config)).keys() == found.keys()


def test_a_model_without_a_head(llama):
    assert list(token_weights(AutoModel.from_config(llama.config))) == ["embed_tokens.weight"]
