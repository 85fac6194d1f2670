import pytest
import torch

from optimum_neuronal.decoder.finding import find_decoder
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
