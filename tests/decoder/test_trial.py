import weakref

import pytest
import torch
from torch import nn

from optimum_neuronal.decoder.finding import find_decoder
from optimum_neuronal.decoder.projections import Projection
from optimum_neuronal.decoder.trial import trial_weights
from optimum_neuronal.sparsity.changes import Zeros


def everything(projection):
    return Zeros(torch.ones(projection.shape, dtype=torch.bool))


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
    with trial_weights(experts[1:], lambda p: Zeros(row if p.expert == 1 else ~row)):
        assert experts[0].weight.bool().all()
        assert torch.equal(experts[1].weight == 0, row) and torch.equal(experts[2].weight == 0, ~row)
    assert module.up.data.data_ptr() == original.data_ptr()
    assert original.bool().all()


def test_one_change_exists_at_a_time():
    layers = [Projection(str(i), None, nn.Linear(2, 2), True) for i in range(3)]
    made = []

    def change_of(projection):
        assert all(change() is None for change in made), "an earlier one is still alive"
        change = Zeros(torch.ones(2, 2, dtype=torch.bool))
        made.append(weakref.ref(change))
        return change

    with trial_weights(layers, change_of):
        assert not any(projection.weight.any() for projection in layers)
    assert len(made) == 3 and all(projection.weight.any() for projection in layers)
