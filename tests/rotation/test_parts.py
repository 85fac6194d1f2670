from dataclasses import replace

import pytest
import torch
import transformers
from accelerate import cpu_offload
from conftest import make_model
from families import FAMILIES
from kinds import KINDS
from turning import parts_of

from optimum_neuronal import NeuronALConfig, NeuronALPruner
from optimum_neuronal.compat.accelerate import is_offloaded, set_weights_map
from optimum_neuronal.model import architectures
from optimum_neuronal.model.architectures import Architecture
from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.rotation.norms import neutral_value
from optimum_neuronal.rotation.parts import find_parts

from .test_merging import ROTATED


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in ROTATED])
def test_a_family_that_is_not_known_is_refused_before_any_work(family, ids, monkeypatch):
    model = make_model(family)
    monkeypatch.setattr(type(model), "forward", lambda *_args, **_kwargs: pytest.fail("work began"))
    with pytest.raises(ValueError, match=r"it is not known how .* can be rotated.* register_architecture\("):
        NeuronALPruner(NeuronALConfig(0.7, "wanda", rotate=True, num_samples=12)).prune(model, ids)


@pytest.mark.parametrize("kind", ["LlamaForSequenceClassification", "Qwen3Model"])
def test_without_a_head_there_is_nothing_to_check_with(kind):
    config_class, fields = KINDS[kind]
    model = getattr(transformers, kind)(config_class(**fields))
    with pytest.raises(ValueError, match=f"{kind} .* has no causal language-model head"):
        parts_of(model)


def test_offloaded_weights_are_not_read():
    """A head that is tied is known by its name then, and an RMS norm by its class."""
    model = make_model("gemma")
    expected = parts_of(model)
    cpu_offload(model)
    for name, module in model.named_modules():
        if is_offloaded(module):
            set_weights_map(module, {f"{name} is read": None})
    found = parts_of(model)
    assert found.rotates_stream and found.unties and len(list(found.parameters())) == len(list(expected.parameters()))
    assert neutral_value(found.final_norm) == neutral_value(expected.final_norm) == 0


def test_images_write_into_the_stream_too():
    parts = parts_of(make_model("gemma3"))
    assert not parts.rotates_stream and not parts.unties and not any(own.folds or own.writers for own in parts.blocks)


@pytest.mark.parametrize("family, heads", [("gemma", True), ("llama", False)])
def test_a_tied_head_can_be_left_alone(family, heads):
    parts = find_parts(find_decoder(make_model(family)), unties=False)
    assert parts.rotates_stream is not heads and not parts.unties
    assert find_parts(find_decoder(make_model(family))).rotates_stream


@pytest.mark.parametrize(
    "family, writer, first, count, size, group",
    [
        ("llama", "v_proj", [0, 8, 16, 24], 4, 8, 1),
        ("mistral", "v_proj", [0, 8], 2, 8, 2),
        ("qwen3", "v_proj", [0, 16], 2, 16, 2),
        ("phi3", "qkv_proj", [48, 56], 2, 8, 2),
        ("gpt2", "c_attn", [64, 72, 80, 88], 4, 8, 1),
        ("gpt_neox", "query_key_value", [16, 40, 64, 88], 4, 8, 1),
        ("codegen", "qkv_proj", [8, 32, 56, 80], 4, 8, 1),
    ],
)
def test_where_heads_lie(family, writer, first, count, size, group):
    """By hand: hidden size 32, four query heads; the first row of each head's values."""
    heads = parts_of(make_model(family)).blocks[1].heads
    assert heads.writer.name.endswith(writer)
    assert heads.rows.tolist() == [row + number for row in first for number in range(size)]
    assert (heads.count, heads.size, heads.group) == (count, size, group)


def test_what_reads_and_writes_the_stream():
    own = parts_of(make_model("qwen2_moe")).blocks[1]
    (attention, first), (mlp, second) = own.folds
    module = own.block.module
    assert attention is module.input_layernorm and mlp is module.post_attention_layernorm

    def local(found):
        return {p.name.removeprefix(own.block.name + ".") for p in found}

    assert local(first) == {f"self_attn.{name}_proj" for name in "qkv"}
    experts = {f"mlp.experts.{number}.gate_up_proj" for number in range(4)}
    shared = {"mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"}
    assert local(second) == experts | shared | {"mlp.gate", "mlp.shared_expert_gate"}
    down = {f"mlp.experts.{number}.down_proj" for number in range(4)} | {"mlp.shared_expert.down_proj"}
    assert local(own.writers) == down | {"self_attn.o_proj"}


@pytest.mark.parametrize(
    "family, embeddings, norms",
    [
        ("gpt2", ["wte", "wpe"], [["ln_1"], ["ln_2"]]),
        ("opt", ["embed_tokens", "embed_positions"], [["self_attn_layer_norm"], ["final_layer_norm"]]),
        ("phi", ["embed_tokens"], [["input_layernorm"]]),
        ("apertus", ["embed_tokens"], [["attention_layernorm"], ["feedforward_layernorm"]]),
    ],
)
def test_embeddings_and_norms(family, embeddings, norms):
    parts = parts_of(make_model(family))
    assert parts.keeps_ones == (family != "apertus")
    assert [own is parts.decoder.module.get_submodule(name) for own, name in zip(parts.embeddings, embeddings)]
    assert len(parts.embeddings) == len(embeddings)
    own = parts.blocks[1]
    assert [[name for name, m in own.block.module.named_children() if m is norm] for norm, _ in own.folds] == norms
    assert len(own.writers) == 2 and sum(len(readers) for _, readers in own.folds) == len(own.block.projections) - 2


@pytest.mark.parametrize("values", [{3: 0.0}, {3: 9e-4, 5: 1.0}, {7: -1e9}], ids=["zero", "small", "large"])
def test_a_scale_that_no_bias_can_be_divided_by_leaves_the_stream(values):
    model = make_model("opt")
    with torch.no_grad():
        for place, value in values.items():
            model.model.decoder.layers[1].final_layer_norm.weight[place] = value
    parts = parts_of(model)
    assert not parts.rotates_stream and not any(own.folds or own.writers for own in parts.blocks)


def test_without_a_bias_every_scale_will_do():
    model = make_model("mpt")
    with torch.no_grad():
        model.transformer.blocks[1].norm_1.weight[3] = 0
    assert parts_of(model).rotates_stream


@pytest.mark.parametrize("overrides", [{"do_layer_norm_before": False}, {"word_embed_proj_dim": 16}])
def test_the_stream_of_small_opt_stays(overrides):
    """Its norms lie behind attention and MLP, and matrices lead into the stream and out of it."""
    parts = parts_of(make_model("opt", **overrides))
    assert not parts.rotates_stream and len(parts.blocks) == 3


def test_what_is_not_pruned_is_rotated_too():
    chosen = parts_of(make_model("llama"), targets=["q_proj"], ignore=[r"layers\.0\."])
    whole = parts_of(make_model("llama"))
    assert (
        len(list(chosen.parameters())) == len(list(whole.parameters())) == len(list(make_model("llama").parameters()))
    )


def test_a_rotation_that_no_pruned_projection_feels_is_refused():
    with pytest.raises(ValueError, match="attention heads alone are rotated, but targets and ignore leave out"):
        parts_of(make_model("xglm"), targets=["fc1"])
    assert parts_of(make_model("xglm"), targets=["fc1", "v_proj"]).blocks
    assert parts_of(make_model("llama"), targets=["up_proj"]).rotates_stream


@pytest.mark.parametrize(
    "break_it, message",
    [
        (lambda model: setattr(model.model, "norm", torch.nn.Identity()), "no RMS or layer norm behind its blocks: .* norm,"),
        (lambda model: setattr(model.model.layers[1], "post_attention_layernorm", torch.nn.Identity()),
         r"layers\.1 has no RMS or layer norms in front of attention and MLP: expected names of input_layernorm,"),
        (lambda model: delattr(model.model.layers[1], "input_layernorm"), r"layers\.1 has no RMS or layer norms in front of"),
    ],
)  # fmt: skip
def test_a_block_of_another_kind_is_refused(llama, break_it, message):
    break_it(llama)
    with pytest.raises(ValueError, match=message):
        parts_of(llama)


@pytest.mark.parametrize(
    "family, rotates, message",
    [
        ("deepseek_v3", "stream", "has no projections of values and of the attention's output"),
        ("falcon_h1", "stream", "has the role 'mixer', which no rotation is known for"),
        ("gemma4_text", "heads", "has no projections of values"),
    ],
)
def test_a_family_that_was_registered_wrongly_is_refused(family, rotates, message, monkeypatch):
    known = architectures.find_architecture(family)
    monkeypatch.setitem(architectures._ARCHITECTURES, family, replace(known, rotates=rotates))
    with pytest.raises(ValueError, match=f"rotate: .* {message}"):
        parts_of(make_model(family))


@pytest.mark.parametrize(
    "family, overrides",
    [("olmo", {"clip_qkv": 8.0}), ("olmoe", {"clip_qkv": 8.0}), ("mpt", {"attn_config": {"clip_qkv": 8.0}})],
)
def test_values_that_are_clipped_cannot_be_rotated(family, overrides):
    with pytest.raises(ValueError, match=r"clips queries, keys and values at 8 \(clip_qkv\)"):
        parts_of(make_model(family, **overrides))
    assert parts_of(make_model(family)).blocks


def test_neutral_weights_of_norms():
    assert neutral_value(make_model("llama").model.norm) == 1
    assert neutral_value(make_model("gemma").model.norm) == 0
    assert neutral_value(make_model("nemotron").model.norm) == 0
    assert neutral_value(make_model("opt").model.decoder.final_layer_norm) == 1


def test_rotates_is_checked():
    with pytest.raises(ValueError, match="rotates is 'all'"):
        Architecture(rotates="all")
