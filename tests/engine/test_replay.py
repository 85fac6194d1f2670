import pytest
import torch
from torch import nn

from optimum_neuronal.engine.calls import Call
from optimum_neuronal.engine.replay import replay
from optimum_neuronal.engine.statistics import Hessian, SquaredNorms
from optimum_neuronal.model.projections import Block, Projection


class Doubling(nn.Module):
    """Adds to its input twice the sum of the features, and what it is called with."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False)
        self.up.weight.data, self.down.weight.data = 2 * torch.eye(2), torch.ones(1, 2)

    def forward(self, hidden_states, added, shared=None):
        result = hidden_states + self.down(self.up(hidden_states)) + added
        if shared is not None:
            shared["calls"] = shared.get("calls", 0) + 1
            result = result + shared["calls"]
        return result, "more"


@pytest.fixture
def block():
    module = Doubling()
    projections = [Projection("up", "up", module.up, True), Projection("down", "down", module.down, True)]
    return Block("block", module, {projection.name: projection for projection in projections})


HIDDEN = [torch.tensor([[[1.0, 2.0]]]), torch.tensor([[[3.0, 0.0]]])]  # two batches of one sequence of one token
CALLS = [Call((10.0,), {}), Call((), {"added": 20.0})]


def run(*arguments, **options):
    with torch.no_grad():
        return replay(*arguments, **options)


def test_every_batch_by_its_own_call(block):
    outputs, recorded = run(block, HIDDEN, CALLS, record=None)
    assert [output.tolist() for output in outputs] == [[[[17.0, 18.0]]], [[[29.0, 26.0]]]]
    assert recorded == {}


def test_inputs_are_recorded_over_all_batches(block):
    recorded = run(block, HIDDEN, CALLS)[1]
    assert recorded["up"].value.tolist() == [[1, 4], [9, 0]]
    assert recorded["down"].value.tolist() == [[4, 16], [36, 0]]
    assert type(recorded["up"]) is SquaredNorms and recorded["up"].tokens == 2
    assert run(block, HIDDEN, CALLS, Hessian)[1]["up"].hessian.tolist() == [[10, 2], [2, 4]]


def test_what_is_skipped_is_zero_and_still_recorded(block):
    outputs, recorded = run(block, HIDDEN, CALLS, skipped=[block.projections["down"]])
    assert [output.tolist() for output in outputs] == [[[[11.0, 12.0]]], [[[23.0, 20.0]]]]
    assert recorded["down"].value.tolist() == [[4, 16], [36, 0]]


def test_what_blocks_share_is_kept_by_batch(block):
    """Every batch has one container, whatever the other batch did with it."""
    shared = {}
    calls = [Call((0.0,), {"shared": shared}) for _ in HIDDEN]
    hidden = [states.clone() for states in HIDDEN]
    for states in hidden:
        states.shared_contents = {id(shared): {}}
    first = run(block, hidden, calls, record=None)[0]
    assert [output.shared_contents[id(shared)] for output in first] == [{"calls": 1}] * 2
    second = run(block, first, calls, record=None)[0]
    assert [output.shared_contents[id(shared)] for output in second] == [{"calls": 2}] * 2


def test_the_block_is_left_as_it_was(block):
    run(block, HIDDEN, CALLS, skipped=[block.projections["down"]])
    with pytest.raises(TypeError):
        run(block, HIDDEN, [Call((), {})] * 2, skipped=[block.projections["down"]])
    for module in block.module.modules():
        assert not module._forward_pre_hooks and "forward" not in module.__dict__
