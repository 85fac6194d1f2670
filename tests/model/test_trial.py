import weakref

import pytest
import torch
from torch import nn

from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.model.projections import Projection
from optimum_neuronal.model.trial import TrialWeights, trial_weights
from optimum_neuronal.sparsity.masks import Zeros


def everything(projection):
    return Zeros(torch.zeros(projection.shape, dtype=torch.bool))


def test_trial_weights_are_put_back(any_model):
    decoder = find_decoder(any_model)
    before = {name: p.owner.data for name, p in decoder.projections.items()}
    copies = {name: weight.clone() for name, weight in before.items()}
    pruned = decoder.blocks[0].pruned
    with pytest.raises(KeyboardInterrupt), trial_weights(pruned, everything):
        assert all(not p.weight.any() for p in pruned)
        raise KeyboardInterrupt
    for name, projection in decoder.projections.items():
        assert projection.owner.data.data_ptr() == before[name].data_ptr()
        assert torch.equal(projection.owner.data, copies[name])


def test_a_failing_change_puts_the_others_back(llama):
    pruned = find_decoder(llama).blocks[0].pruned
    before = [p.weight.clone() for p in pruned]

    def change_of(projection):
        if projection is pruned[3]:
            raise RuntimeError("no mask")
        return everything(projection)

    with pytest.raises(RuntimeError, match="no mask"), trial_weights(pruned, change_of):
        pass
    assert all(torch.equal(p.weight, weight) for p, weight in zip(pruned, before))


@pytest.mark.parametrize("transposed", [False, True])
def test_only_the_experts_that_are_asked_for_change(transposed):
    module = nn.Module()
    module.up = nn.Parameter(torch.ones(3, 2, 4))
    experts = [Projection(f"experts.{e}.up", "up", module, True, "up", e, transposed) for e in range(3)]
    row = torch.zeros(experts[0].shape, dtype=torch.bool)
    row[1] = True
    original = module.up.data
    with trial_weights(experts[1:], lambda p: Zeros(~row if p.expert == 1 else row)):
        assert experts[0].weight.bool().all()
        assert torch.equal(experts[1].weight == 0, row) and torch.equal(experts[2].weight == 0, ~row)
    assert module.up.data.data_ptr() == original.data_ptr()
    assert original.bool().all()


def test_one_change_exists_at_a_time():
    layers = [Projection(str(i), None, nn.Linear(2, 2), True) for i in range(3)]
    made = []

    def change_of(projection):
        assert all(change() is None for change in made), "an earlier one is still alive"
        change = Zeros(torch.zeros(2, 2, dtype=torch.bool))
        made.append(weakref.ref(change))
        return change

    with trial_weights(layers, change_of):
        assert not any(projection.weight.any() for projection in layers)
    assert len(made) == 3 and all(projection.weight.any() for projection in layers)


class TestPrepared:
    def test_weights_take_their_places_again_and_again(self, any_model):
        pruned = find_decoder(any_model).blocks[0].pruned
        before = {p.name: (p.owner.data, p.owner.data.clone()) for p in pruned}
        prepared = TrialWeights(pruned, everything)
        for _ in range(2):
            with prepared.in_place():
                assert all(not p.weight.any() for p in pruned)
            for projection in pruned:
                original, copy = before[projection.name]
                assert projection.owner.data.data_ptr() == original.data_ptr()
                assert torch.equal(projection.owner.data, copy)

    def test_changes_are_asked_for_once_and_at_once(self, llama):
        pruned = find_decoder(llama).blocks[0].pruned
        asked = []
        prepared = TrialWeights(pruned[:3], lambda p: asked.append(p.name) or everything(p))
        assert asked == [p.name for p in pruned[:3]]
        for _ in range(2):
            with prepared.in_place():
                assert not pruned[0].weight.any() and pruned[3].weight.any()
        assert len(asked) == 3

    def test_they_are_kept_in_the_parameters_own_layout(self):
        layer = Projection("c_attn", None, nn.Module(), True, transposed=True)
        layer.module.weight = nn.Parameter(torch.ones(4, 2))  # (in, out)
        row = torch.zeros(2, 4, dtype=torch.bool)
        row[1] = True
        (tensor,) = TrialWeights([layer], lambda p: Zeros(~row)).tensors.values()
        assert tensor.tolist() == [[1.0, 0.0]] * 4
        assert layer.module.weight.bool().all()

    def test_an_exception_puts_the_originals_back(self, llama):
        pruned = find_decoder(llama).blocks[0].pruned
        before = [p.weight.clone() for p in pruned]
        with pytest.raises(KeyboardInterrupt), TrialWeights(pruned, everything).in_place():
            raise KeyboardInterrupt
        assert all(torch.equal(p.weight, weight) for p, weight in zip(pruned, before))

    def test_nothing_prepared_changes_nothing(self, llama):
        before = [parameter.data_ptr() for parameter in llama.parameters()]
        with TrialWeights([], everything).in_place():
            assert [parameter.data_ptr() for parameter in llama.parameters()] == before
