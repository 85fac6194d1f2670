from types import SimpleNamespace

import pytest
import torch
from conftest import make_model
from families import FAMILIES
from profiles import NIGHT

from optimum_neuronal.blocks.block_inputs import Stream
from optimum_neuronal.blocks.runner import BlockRunner
from optimum_neuronal.common.torch_state import inference
from optimum_neuronal.model.architectures import FEEDS
from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.model.projections import Place, kind_of
from optimum_neuronal.topup.neuronal import row_groups


HEADS = SimpleNamespace(num_attention_heads=2)
PLACE = torch.tensor([10.0, 11.0, 20.0, 21.0])  # 2 heads of 2 features


def groups_of(role, rows, features=4, config=HEADS):
    """Of a projection that feeds a place of so many features, or an unknown one."""
    place = Place("o_proj", features) if FEEDS[role] else None
    decoder = SimpleNamespace(config=config, place_fed_by=lambda block, projection: place)
    return row_groups(decoder, None, SimpleNamespace(name="p", role=role, shape=(rows, 8)))


def values(role, rows, place=PLACE, config=HEADS):
    result = torch.empty(rows)
    for group in groups_of(role, rows, len(place), config):
        result[group.rows] = group.values(place)
    return result.tolist()


def test_rows_of_separate_projections():
    assert values("query", 4) == values("key", 4) == values("value", 4) == values("up", 4) == PLACE.tolist()
    assert values("key", 2) == [15, 16], "one key head serves both: means of 10 and 20, 11 and 21"
    four = SimpleNamespace(num_attention_heads=4)
    assert values("value", 4, torch.arange(8.0), four) == [1, 2, 5, 6], "means of 0 2, 1 3, 4 6, 5 7"


def test_rows_of_fused_projections():
    assert values("gate_up", 8) == [10, 11, 20, 21] * 2
    assert values("qkv", 12) == [10, 11, 20, 21] * 3
    assert values("qkv", 8) == values("interleaved_qkv", 8) == [10, 11, 20, 21, 15, 16, 15, 16]
    assert values("interleaved_qkv", 12) == [10, 11] * 3 + [20, 21] * 3


@pytest.mark.parametrize("role, rows", [("query", 5), ("query", 6), ("key", 3), ("qkv", 11), ("interleaved_qkv", 5), ("up", 2),
                                        ("gate_up", 6), ("mixer", 4), ("interleaved_gate_up", 8)])  # fmt: skip
def test_rows_that_are_not_understood_raise(role, rows):
    with pytest.raises(ValueError, match=rf"does not understand p, whose {rows} rows have the role '{role}'.*\['p'\]"):
        groups_of(role, rows)


VARIANTS = [
    *((name, {}) for name in FAMILIES),
    ("falcon", {"multi_query": False, "parallel_attn": False}),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    ("gpt_bigcode", {"multi_query": False}),
    ("gpt_neox", {"use_parallel_residual": False}),
    ("stablelm", {"use_parallel_residual": True}),
    ("stablelm", {"qk_layernorm": True}),
    ("opt", {"do_layer_norm_before": False}),
]
# Role -> its parts that are queries or keys: a row of theirs moves whole heads.
WHOLE_HEADS = {"query": (0,), "key": (0,), "qkv": (0, 1), "interleaved_qkv": (0, 1)}


@pytest.mark.parametrize("family, overrides", VARIANTS, ids=lambda v: v if isinstance(v, str) else "-".join(v))
def test_a_row_moves_the_features_that_it_is_said_to_feed(family, overrides, ids):
    """Enlarge one row, run the block and what follows it, and see which features moved most: apart from any table.

    By day for one expert of each mixture, and for one block of several alike and the last.
    """
    model, tried = make_model(family, **overrides), set()
    with inference(model):
        decoder = find_decoder(model)
        inputs = BlockRunner(decoder, 2).capture(ids[:2])
        hidden = Stream(inputs.hidden)
        for index, block in enumerate(decoder.blocks):
            for projection in block.projections.values():
                kind = kind_of(block, projection), projection.shape, index == len(decoder.blocks) - 1
                if not NIGHT and kind in tried:
                    continue
                known = projection.role is None or FEEDS[projection.role]
                for part, group in enumerate(row_groups(decoder, block, projection) if known else []):
                    for chosen in {len(group.rows) // 2, len(group.rows) - 1}:
                        if _check(decoder, inputs, index, hidden, projection, group, part, chosen):
                            tried.add(kind)
            hidden = BlockRunner(decoder).output(block, hidden, inputs.calls[index])


def _check(decoder, inputs, index, hidden, projection, group, part, chosen) -> bool:
    """Return False for an expert that no token was routed to, which shows nothing."""
    place = decoder.place_fed_by(decoder.blocks[index], projection)
    named = group.features[chosen]
    count = len(named)
    heads = part in WHOLE_HEADS.get(projection.role, ())
    if heads:
        features = torch.arange(place.features).view(decoder.config.num_attention_heads, -1)
        named = features[torch.isin(features, named).any(dim=1)].flatten()

    before = _inputs(decoder, inputs, index, hidden, place)
    original = projection.weight[group.rows[chosen]].clone()
    # A row that passes a norm over its head or over all heads is changed gently, or everything else would move more.
    projection.weight[group.rows[chosen]] *= 1.5 if heads else -100
    after = _inputs(decoder, inputs, index, hidden, place)
    projection.weight[group.rows[chosen]] = original

    if not before.any() or torch.equal(before, after) and projection.expert is not None:
        return False
    moved = (after - before).square().sum(dim=0)
    others = torch.ones(place.features, dtype=torch.bool)
    others[named] = False
    message = f"row {group.rows[chosen]} of {projection.name}, said to feed {named.tolist()} of {place.name}"
    assert moved[named].max() > 1e-8 * before.square().max(), f"{message}, moves nothing there"
    assert count <= moved.count_nonzero(), f"{message}, moves fewer"
    assert not others.any() or moved[others].max() <= moved[named].max(), message
    return True


def _inputs(decoder, inputs, index, hidden, place):
    """What arrives at a place, shape (n, features), when block `index` runs on `hidden`."""
    block, found, runner = decoder.blocks[index], [], BlockRunner(decoder)
    projection = block.projections.get(place.name)
    if projection is not None and projection.expert is not None:
        return runner.replay(block, hidden, inputs.calls[index])[1][place.name].value.sqrt()
    blocks = decoder.blocks[index : index + 2]
    readers = {name: p.module for each in blocks for name, p in each.projections.items()}
    readers |= {experts.name: experts.module for each in blocks for experts in each.experts}
    if place.name == block.name and len(blocks) == 1:
        output = runner.output(block, hidden, inputs.calls[index])
        return (inputs.final_norm or torch.nn.Identity())(output.batches[0]).flatten(0, -2)
    reader = readers[blocks[1].entry if place.name == block.name else place.name]
    handle = reader.register_forward_pre_hook(lambda _module, args: found.append(args[0].flatten(0, -2)))
    output = runner.output(block, hidden, inputs.calls[index])
    if len(blocks) > 1:
        runner.output(blocks[1], output, inputs.calls[index + 1])
    handle.remove()
    return found[0]
