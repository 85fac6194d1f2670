import pytest
import torch
from conftest import make_model

from optimum_neuronal.architectures import (
    DOWN_INPUT,
    MLP_INPUT,
    NEXT_INPUT,
    OUTPUT_INPUT,
    Architecture,
    find_architecture,
    register_architecture,
    row_groups,
)
from optimum_neuronal.blocks import find_decoder
from optimum_neuronal.capture import capture_inputs, inference, replay


def values(groups, place):
    rows = torch.empty(sum(len(group.rows) for group in groups))
    for group in groups:
        rows[group.rows] = group.values(place)
    return rows.tolist()


def test_key_rows_are_averaged_over_the_heads_they_serve():
    place = torch.arange(8.0)  # 4 heads of 2 features
    assert values(row_groups("query", "contiguous", 8, 8, 4, 2), place) == place.tolist()
    assert values(row_groups("key", "contiguous", 4, 8, 4, 2), place) == [1.0, 2.0, 5.0, 6.0]  # means of 0 2, 1 3, ...


def test_fused_layouts():
    place = torch.tensor([10.0, 11.0, 20.0, 21.0])  # 2 heads of 2 features
    contiguous = row_groups("qkv", "contiguous", 12, 4, 2, 2)
    assert values(contiguous, place) == [10, 11, 20, 21] * 3
    interleaved = row_groups("qkv", "interleaved", 12, 4, 2, 2)
    assert values(interleaved, place) == [10, 11] * 3 + [20, 21] * 3
    assert len(contiguous) == len(interleaved) == 3
    assert values(row_groups("gate_up", "contiguous", 8, 4, 2, 2), place) == [10, 11, 20, 21] * 2


def test_rows_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="12 rows of a 'query' projection do not map to 8 features"):
        row_groups("query", "contiguous", 12, 8, 4, 4)


def test_roles_prefer_the_longest_name():
    gpt2 = find_architecture("gpt2")
    assert gpt2.role("attn.c_proj") == "output" and gpt2.role("mlp.c_proj") == "down"
    assert find_architecture("llama").role("self_attn.q_proj") == "query"
    assert find_architecture("llama").role("self_attn.rotary") is None


def test_unknown_role_and_layout_are_refused():
    with pytest.raises(ValueError, match="'w1' has the role 'gatee'"):
        Architecture(roles={"w1": "gatee"})
    with pytest.raises(ValueError, match="qkv_layout"):
        Architecture(qkv_layout="diagonal")
    with pytest.raises(TypeError, match="expects an Architecture, got dict"):
        register_architecture("mine", {})


def test_parallel_attention_feeds_the_next_block():
    for family, parallel in (("llama", False), ("phi", True), ("gpt_neox", True)):
        decoder = find_decoder(make_model(family))
        output = decoder.blocks[0].reader(OUTPUT_INPUT)
        assert decoder.place_fed_by(output) == (NEXT_INPUT if parallel else MLP_INPUT)
    sequential = find_decoder(make_model("gpt_neox", use_parallel_residual=False))
    assert sequential.place_fed_by(sequential.blocks[0].reader(OUTPUT_INPUT)) == MLP_INPUT


def test_a_row_moves_the_features_that_the_table_names(any_model, ids):
    """Turn one row of a projection around and enlarge it, run the block, and see which features moved.

    A row of v or of the MLP moves the features it feeds and no other; one of q or k the whole heads that they are in.
    """
    with inference(any_model):
        decoder = find_decoder(any_model)
        block = decoder.blocks[0]
        inputs = capture_inputs(decoder, ids[:2], 2, torch.device("cpu"))
        _, before = replay(block, inputs.hidden, inputs.calls[0])
        head_dim = block.reader(OUTPUT_INPUT).shape[1] // decoder.config.num_attention_heads
        for projection in block.pruned:
            place = decoder.place_fed_by(projection)
            if place not in (OUTPUT_INPUT, DOWN_INPUT):
                continue  # the others write to the residual stream: see the next test
            reader = block.reader(place).name
            for part, group in enumerate(decoder.row_groups(block, projection)):
                row = len(group.rows) // 2
                original = projection.weight[group.rows[row]].clone()
                projection.weight[group.rows[row]] *= -100
                _, after = replay(block, inputs.hidden, inputs.calls[0])
                projection.weight[group.rows[row]] = original
                difference = (after[reader].value - before[reader].value).abs().sum(dim=0)
                moved = set((difference > 1e-6).nonzero().flatten().tolist())
                named = set(group.features[row].tolist())
                if projection.role in ("query", "key") or (projection.role == "qkv" and part < 2):
                    assert {feature // head_dim for feature in moved} == {feature // head_dim for feature in named}
                else:
                    assert moved == named, projection.name


def test_the_residual_stream_keeps_its_features(any_model, ids):
    """Rows of the output and down projections are the features of the block's output."""
    with inference(any_model):
        decoder = find_decoder(any_model)
        block = decoder.blocks[0]
        inputs = capture_inputs(decoder, ids[:1], 1, torch.device("cpu"))
        (before,), _ = replay(block, inputs.hidden, inputs.calls[0])
        down = block.reader(DOWN_INPUT)
        down.weight[5] *= 100
        (after,), _ = replay(block, inputs.hidden, inputs.calls[0])
    assert ((after - before).abs().sum(dim=(0, 1)) > 1e-6).nonzero().flatten().tolist() == [5]
