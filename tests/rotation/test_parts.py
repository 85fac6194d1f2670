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
from optimum_neuronal.rotation.parts import find_parts, neutral_value

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
    "family, writer, rows, count, size, group",
    [
        ("llama", "v_proj", slice(0, None), 4, 8, 1),
        ("mistral", "v_proj", slice(0, None), 2, 8, 2),
        ("qwen3", "v_proj", slice(0, None), 2, 16, 2),
        ("phi3", "qkv_proj", slice(48, None), 2, 8, 2),
        ("gpt2", "c_attn", slice(64, None), 4, 8, 1),
    ],
)
def test_where_heads_lie(family, writer, rows, count, size, group):
    """By hand: hidden size 32, four query heads."""
    heads = parts_of(make_model(family)).blocks[1].heads
    assert heads.writer.name.endswith(writer) and heads.rows == rows
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


def test_what_is_not_pruned_is_rotated_too():
    chosen = parts_of(make_model("llama"), targets=["q_proj"], ignore=[r"layers\.0\."])
    whole = parts_of(make_model("llama"))
    assert (
        len(list(chosen.parameters())) == len(list(whole.parameters())) == len(list(make_model("llama").parameters()))
    )


def test_a_rotation_that_no_pruned_projection_feels_is_refused():
    with pytest.raises(ValueError, match="attention heads alone are rotated, but targets and ignore leave out"):
        parts_of(make_model("opt"), targets=["fc1"])
    assert parts_of(make_model("opt"), targets=["fc1", "v_proj"]).blocks
    assert parts_of(make_model("llama"), targets=["up_proj"]).rotates_stream


@pytest.mark.parametrize(
    "break_it, message",
    [
        (lambda model: setattr(model.model, "norm", torch.nn.LayerNorm(32)), "no RMS norm named 'norm' behind its blocks"),
        (lambda model: setattr(model.model.layers[1], "post_attention_layernorm", torch.nn.Identity()),
         r"layers\.1 has no RMS norms named 'input_layernorm' and 'post_attention_layernorm'"),
    ],
)  # fmt: skip
def test_a_block_of_another_kind_is_refused(llama, break_it, message):
    break_it(llama)
    with pytest.raises(ValueError, match=message):
        parts_of(llama)


@pytest.mark.parametrize(
    "family, rotates, message",
    [
        ("gpt_neox", "heads", "has no projections of values and of the attention's output"),
        ("opt", "stream", "has no RMS norm named 'norm' behind its blocks"),
        ("deepseek_v3", "stream", "has no projections of values"),
        ("falcon_h1", "stream", "has no RMS norm named 'norm' behind its blocks"),
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


def test_rotates_is_checked():
    with pytest.raises(ValueError, match="rotates is 'all'"):
        Architecture(rotates="all")
