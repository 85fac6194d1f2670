import math
import weakref
from types import SimpleNamespace

import pytest
import torch
from by_hand import make_experts
from conftest import make_model
from sparse_checkpoints import tensors_of
from torch import nn

from optimum_neuronal.model.architectures import Architecture
from optimum_neuronal.model.change import Zeros
from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.model.projections import (
    Block,
    Decoder,
    Experts,
    Place,
    Projection,
    every_projection,
    kind_of,
    stored_names,
    trial_tensors,
    trial_weights,
    with_stars,
)


def linear(name, role, features=(3, 2), pruned=True):
    return Projection(name, role, nn.Linear(*features), pruned)


def expert(number, transposed=False):
    module = nn.Module()
    module.up_proj = nn.Parameter(torch.arange(4.0 * 5 * 6).view(4, 5, 6))
    return Projection(f"b.mlp.experts.{number}.up_proj", "up", module, True, "up_proj", number, transposed)


def block(*projections, experts=()):
    return Block("b", nn.Module(), {projection.name: projection for projection in projections}, experts)


def decoder(*blocks, parallel=False):
    return Decoder(nn.Module(), blocks, Architecture(parallel=parallel), SimpleNamespace(), nn.Module())


ATTENTION = [linear(f"b.attn.{letter}", role) for letter, role in [("q", "query"), ("o", "output")]]
MLP = [linear("b.mlp.up", "up", (7, 9)), linear("b.mlp.down", "down", (9, 7))]


def test_a_transposed_weight_is_seen_as_out_by_in():
    up = expert(1, transposed=True)
    assert up.shape == (6, 5) and torch.equal(up.weight, up.module.up_proj[1].T)
    up.weight[0] = -1
    assert up.module.up_proj[1, :, 0].tolist() == [-1] * 5
    assert torch.equal(up.view(torch.zeros(4, 5, 6)), torch.zeros(6, 5))


class TestBlock:
    def test_what_reads_its_input(self):
        assert block(*MLP, *ATTENTION).entry == "b.attn.q"
        assert block(*MLP).entry == "b.mlp.up"
        assert block(linear("b.conv", None)).entry == "b.conv"

    def test_what_reads_its_mlps_input(self):
        mixture = Experts("b.mlp.experts", nn.Module(), stacked=False)
        assert block(*ATTENTION).mlp_input is None
        assert block(*MLP).mlp_input == Place("b.mlp.up", 7)
        assert block(expert(0), experts=[mixture]).mlp_input == Place("b.mlp.experts", 6)
        assert block(expert(0), *MLP, experts=[mixture]).mlp_input == Place("b.mlp.up", 7), "a shared expert"
        stacked = Experts("b.mlp.experts", nn.Module(), stacked=True)
        assert block(expert(0), experts=[stacked]).mlp_input is None, "it does not see every token"


class TestDecoder:
    @pytest.mark.parametrize("parallel", [False, True])
    def test_what_rows_feed(self, parallel):
        whole = block(*ATTENTION, *MLP, linear("b.extra", None))
        places = [decoder(whole, parallel=parallel).place_fed_by(whole, p) for p in whole.projections.values()]
        after_attention = Place("b", 2) if parallel else Place("b.mlp.up", 7)
        assert places == [Place("b.attn.o", 3), after_attention, Place("b.mlp.down", 9), Place("b", 7), None]
        alone = block(*ATTENTION)
        assert decoder(alone).feeds_next_block(alone, ATTENTION[1]), "without an MLP"

    def test_rows_that_nothing_reads_are_named(self):
        lonely = block(ATTENTION[0])
        message = "b.attn has no 'output' projection that reads the output of b.attn.q: use steps='block'"
        with pytest.raises(ValueError, match=message):
            decoder(lonely).place_fed_by(lonely, ATTENTION[0])


def everything(projection):
    return Zeros(torch.zeros(projection.shape, dtype=torch.bool))


class TestTrialWeights:
    def test_they_take_their_places_and_are_put_back(self, any_model):
        decoder = find_decoder(any_model)
        before = {name: (p.owner.data, p.owner.data.clone()) for name, p in decoder.projections.items()}
        pruned, asked = decoder.blocks[0].pruned, []

        def change_of(projection):
            asked.append(projection.name)
            return everything(projection)

        changed = trial_tensors(pruned, change_of)
        assert asked == [p.name for p in pruned], "once and at once"
        assert all(torch.equal(changed[p.owner], torch.zeros_like(p.owner)) for p in pruned)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt), trial_weights(pruned, change_of):
                assert all(not p.weight.any() for p in pruned)
                raise KeyboardInterrupt
            for name, projection in decoder.projections.items():
                original, copy = before[name]
                assert projection.owner.data.data_ptr() == original.data_ptr()
                assert torch.equal(projection.owner.data, copy)
        assert len(asked) == 3 * len(pruned)

    @pytest.mark.parametrize("transposed", [False, True])
    def test_only_the_experts_that_are_asked_for_change(self, transposed):
        first, *others = make_experts(3, transposed=transposed).pruned
        row = torch.zeros(first.shape, dtype=torch.bool)
        row[1] = True
        original = first.owner.data
        with trial_weights(others, lambda p: Zeros(~row if p.expert == 1 else row)):
            assert first.weight.bool().all()
            assert torch.equal(others[0].weight == 0, row) and torch.equal(others[1].weight == 0, ~row)
        assert first.owner.data.data_ptr() == original.data_ptr() and original.bool().all()

    def test_one_change_exists_at_a_time(self):
        layers = [Projection(str(i), None, nn.Linear(2, 2), True) for i in range(3)]
        made = []

        def change_of(projection):
            assert all(change() is None for change in made), "an earlier one is still alive"
            change = everything(projection)
            made.append(weakref.ref(change))
            return change

        with trial_weights(layers, change_of):
            assert not any(projection.weight.any() for projection in layers)
        assert len(made) == 3 and all(projection.weight.any() for projection in layers)


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
    kinds = {kind_of(block, p): p for block, p in every_projection(decoder) if p.pruned}
    recorded = [name for projection in kinds.values() for name in stored_names(decoder, projection)]
    stored = tensors_of(tmp_path)
    assert set(recorded) <= {with_stars(name) for name in stored} and len(recorded) == len(set(recorded))
    size = sum(tensor.numel() for name, tensor in stored.items() if with_stars(name) in recorded)
    assert size == sum(math.prod(projection.shape) for projection in decoder.projections.values())
