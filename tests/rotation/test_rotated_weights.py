import pytest
import torch
import transformers
from accelerate import cpu_offload
from conftest import make_model
from families import FAMILIES
from kinds import KINDS
from turning import rotated_of

from optimum_neuronal import NeuronALConfig, NeuronALPruner
from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.rotation.rotated_weights import find_rotated

from .test_merging import ROTATED


REFUSED = r"cannot be rotated. Only causal RMS-norm decoders .* with their weights in memory, can: set rotate=False"


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in ROTATED])
def test_other_families_raise_before_any_work(family, ids, monkeypatch):
    model = make_model(family)
    monkeypatch.setattr(type(model), "forward", lambda *_args, **_kwargs: pytest.fail("work began"))
    with pytest.raises(ValueError, match=REFUSED):
        NeuronALPruner(NeuronALConfig(0.7, "wanda", topup="uniform", rotate=True, num_samples=12)).prune(model, ids)


def no_head():
    config_class, fields = KINDS["Qwen3Model"]
    return transformers.Qwen3Model(config_class(**fields))


def without(name):
    model = make_model("llama")
    module = model.model if name == "norm" else model.model.layers[1]
    setattr(module, name, torch.nn.Identity())
    return model


@pytest.mark.parametrize(
    "make",
    [
        no_head,
        lambda: cpu_offload(make_model("llama")),
        lambda: make_model("olmoe", clip_qkv=8.0),
        lambda: without("norm"),
        lambda: without("post_attention_layernorm"),
    ],
    ids=["no head", "offloaded", "clipped values", "no final norm", "no norm in a block"],
)
def test_what_cannot_be_rotated(make):
    with pytest.raises(ValueError, match=REFUSED):
        rotated_of(make())


@pytest.mark.parametrize("family, heads", [("gemma", True), ("llama", False)])
def test_a_tied_head_can_be_left_alone(family, heads):
    rotated = find_rotated(find_decoder(make_model(family)), unties=False)
    assert rotated.rotates_stream is not heads and not rotated.unties
    assert find_rotated(find_decoder(make_model(family))).rotates_stream


@pytest.mark.parametrize(
    "family, writer, first, count, size, group",
    [
        ("llama", "v_proj", [0, 8, 16, 24], 4, 8, 1),
        ("mistral", "v_proj", [0, 8], 2, 8, 2),
        ("qwen3", "v_proj", [0, 16], 2, 16, 2),
        ("phi3", "qkv_proj", [48, 56], 2, 8, 2),
    ],
)
def test_where_heads_lie(family, writer, first, count, size, group):
    """By hand: hidden size 32, four query heads; the first row of each head's values."""
    heads = rotated_of(make_model(family)).blocks[1].heads
    assert heads.writer.name.endswith(writer)
    assert heads.rows.tolist() == [row + number for row in first for number in range(size)]
    assert (heads.count, heads.size, heads.group) == (count, size, group)


def test_what_reads_and_writes_the_stream():
    own = rotated_of(make_model("qwen2_moe")).blocks[1]
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
    chosen = rotated_of(make_model("llama"), targets=["q_proj"], ignore=[r"layers\.0\."])
    model = make_model("llama")
    assert len(list(chosen.parameters())) == len(list(model.parameters()))
    assert [len(own.block.pruned) for own in chosen.blocks] == [0, 1, 1]
