import pytest
import torch
from conftest import make_model
from families import FAMILIES, LAYERS
from torch import nn

from optimum_neuronal.model.architectures import Architecture, find_architecture, register_architecture
from optimum_neuronal.model.find_blocks import find_all_projections, find_decoder


def test_conv1d_is_seen_as_out_by_in():
    model = make_model("gpt2")
    projection = find_decoder(model).projections["transformer.h.0.mlp.c_fc"]
    assert projection.shape == (48, 32) and projection.module.weight.shape == (32, 48)
    projection.weight[3] = 0
    assert torch.equal(projection.module.weight[:, 3], torch.zeros(32))


def test_targets_and_ignore():
    model = make_model("llama")
    decoder = find_decoder(model, targets=["mlp"], ignore=[r"layers\.0\."])
    assert len(decoder.projections) == 3 * (LAYERS - 1)
    assert all("mlp" in name and ".0." not in name for name in decoder.projections)


def test_patterns_that_match_nothing_raise():
    """A hostile pattern is soon searched: Python's `re` takes hours for each of the last two."""
    hostile = [{"ignore": [pattern]} for pattern in ("([a-z._0-9]+)+#", "^(([a-z._0-9])+.)+[A-Z]")]
    for patterns in ({"targets": ["qproj"]}, {"ignore": ["mpl"]}, *hostile):
        with pytest.raises(ValueError, match="(qproj|mpl|a-z).* match no projection"):
            find_decoder(make_model("llama"), **patterns)


def test_what_is_not_understood_is_named():
    model = make_model("llama")
    model.model.layers[1].mlp.lora = nn.Linear(32, 4)
    message = r"unknown names or classes: model\.layers\.1\.mlp\.lora \(Linear, shape \(4, 32\)\)"
    with pytest.raises(ValueError, match=message):
        find_decoder(model)
    for patterns in ({"ignore": ["lora"]}, {"targets": ["up_proj"]}):
        assert "model.layers.1.mlp.lora" not in find_decoder(model, **patterns).projections
    found = find_decoder(model, targets=["."])
    assert found.projections["model.layers.1.mlp.lora"].role is None
    assert found.place_fed_by(found.blocks[1], found.projections["model.layers.1.mlp.lora"]) is None


def test_what_is_never_pruned_may_be_ignored_by_name():
    find_decoder(make_model("mixtral"), ignore=["lm_head", r"mlp\.gate$"])


def test_the_list_of_blocks_can_be_named(llama):
    llama.model.experiments = nn.ModuleList([nn.Linear(4, 4) for _ in range(10)])
    assert find_decoder(llama).blocks[0].name == "model.layers.0", "the longest list of what must not be split"
    llama._no_split_modules = None
    assert len(find_decoder(make_model("biogpt")).blocks) == LAYERS, "the longest list of all, if nothing is said"
    llama.config.model_type = "test-only-blocks"
    message = r"unknown names or classes: model\.experiments\.0 \(Linear, shape \(4, 4\)\)"
    with pytest.raises(ValueError, match=message):
        find_decoder(llama)
    register_architecture("test-only-blocks", Architecture(blocks="layers"))
    assert [block.name for block in find_decoder(llama).blocks] == [f"model.layers.{i}" for i in range(LAYERS)]


def test_the_head_is_no_part_of_the_decoder():
    for family in FAMILIES:
        model = make_model(family)
        decoder = find_decoder(model).module
        assert decoder is not model and model.get_output_embeddings() not in list(decoder.modules()), family


def test_a_family_is_registered_from_outside():
    model = make_model("llama")
    for layer in model.model.layers:
        layer.mlp.extra_down = nn.Linear(48, 32)
    model.config.model_type = "test-only"
    with pytest.raises(ValueError, match="extra_down"):
        find_decoder(model)
    register_architecture("test-only", Architecture(roles={"extra_down": "down"}))
    assert "model.layers.0.mlp.extra_down" in find_decoder(model).projections


def test_a_model_without_blocks_raises(llama):
    del llama.model.layers
    message = r"LlamaForCausalLM has no ModuleList of decoder blocks.*Architecture\(blocks="
    with pytest.raises(ValueError, match=message):
        find_decoder(llama)


def test_all_projections_are_linear_layers_of_any_name_but_routers_and_embeddings():
    model = make_model("mixtral")
    model.model.layers[0].novel, model.model.layers[1].table = nn.Linear(2, 2), nn.Embedding(2, 2)
    model.model.layers[2].odd = nn.Bilinear(2, 2, 2)
    known, found = find_decoder(make_model("mixtral")).projections, find_all_projections(model).projections
    assert found.keys() - known.keys() == {"model.layers.0.novel"} and known.keys() < found.keys()


def test_roles_prefer_the_longest_name():
    assert find_architecture("gpt2").find_role("attn.c_proj") == (True, "output")
    assert find_architecture("gpt2").find_role("mlp.c_proj") == (True, "down")
    assert find_architecture("llama").find_role("self_attn.q_proj") == (True, "query")
    assert find_architecture("llama").find_role("self_attn.rotary") == (False, None)
    assert find_architecture("mixtral").find_role("mlp.gate") == (True, None), "known, and never pruned"
    assert find_architecture("lfm3").find_role("self_attn.g_proj") == (True, None), "a gate, not a projection"


def test_parallel_may_depend_on_the_config():
    class Config:
        parallel_attn = True

    assert find_architecture("falcon").is_parallel(Config)
    Config.parallel_attn = False
    assert not find_architecture("falcon").is_parallel(Config)
    assert all(find_architecture(name).is_parallel(Config) for name in ("cohere", "cohere2_moe"))
    assert not find_architecture("llama").is_parallel(Config)


def test_unknown_roles_raise():
    with pytest.raises(ValueError, match="'w1' has the role 'gatee'"):
        Architecture(roles={"w1": "gatee"})
