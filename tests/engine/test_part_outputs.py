"""What parts of a block put out is kept while it stays the same: against plain forwards, and by counting."""

import pytest
import torch
from conftest import make_model
from sweeps import build_sweep, state, unchanged
from torch import nn

from optimum_neuronal.engine.calls import Call
from optimum_neuronal.engine.capture import inference
from optimum_neuronal.engine.paired_inputs import PairedRuns
from optimum_neuronal.engine.part_outputs import PartOutputs, children_called_once
from optimum_neuronal.engine.streams import Stream
from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.model.projections import Block
from optimum_neuronal.model.trial import TrialWeights, trial_weights
from optimum_neuronal.saliency.alps import ALPS
from optimum_neuronal.sparsity.masks import Zeros


def every_other(projection):
    rows, columns = projection.shape
    return Zeros((torch.arange(rows)[:, None] + torch.arange(columns)) % 2 == 1)


def paired(model, ids, batch_size=4, max_hidden_bytes=None, **chosen):
    """Runner, block, both streams and the calls of a model's second block."""
    sweep = build_sweep(find_decoder(model, **chosen), ALPS(), ids, len(ids), batch_size)
    inputs = sweep.engine.alignment_inputs()
    dense = Stream(inputs.hidden)
    sparse = Stream([states + 0.3 * states.flip(0) for states in dense])
    sweep.engine.runner.max_hidden_bytes = max_hidden_bytes
    return sweep.engine.runner, sweep.decoder.blocks[1], sparse, dense, inputs.calls[1]


def calls_of(module: nn.Module) -> list:
    """Grows with every call that a module's own forward receives."""
    seen, original = [], module.forward

    def counted(*args, **kwargs):
        seen.append(1)
        return original(*args, **kwargs)

    module.forward = counted
    return seen


@pytest.mark.parametrize("max_hidden_bytes", [None, 0])
@pytest.mark.parametrize("family", ["llama", "gpt2", "phi", "opt"])
def test_outputs_are_those_of_whole_forwards_to_the_bit(family, max_hidden_bytes, ids):
    model = make_model(family)
    before = state(model)
    with inference(model):
        runner, block, sparse, dense, calls = paired(model, ids, max_hidden_bytes=max_hidden_bytes)
        runs, solved = PairedRuns(runner, block, sparse, dense, calls), []
        for stage in runs.stages:
            runs.inputs(stage, TrialWeights(solved, every_other))
            solved += stage
        with trial_weights(solved, every_other):
            found, expected = runs.output(0), runner.output(block, sparse, calls)
        assert all(map(torch.equal, found, expected))
        assert all(map(torch.equal, runs.output(1), runner.output(block, dense, calls)))
    assert unchanged(model, before), "weights and hooks"


def test_attention_runs_three_times_instead_of_eight(llama, ids):
    """In the dense model once, in the sparse one to its last projection, and once when that is solved."""
    with inference(llama):
        runner, block, sparse, dense, calls = paired(llama, ids, batch_size=len(ids))
        attention, down = calls_of(block.module.self_attn), calls_of(block.module.mlp.down_proj)
        runs, solved = PairedRuns(runner, block, sparse, dense, calls), []
        attention.clear(), down.clear()
        for stage in runs.stages:
            runs.inputs(stage, TrialWeights(solved, every_other))
            solved += stage
        ran = len(attention)
        with trial_weights(solved, every_other):
            runs.output(0)
        runs.output(1)
    assert len(attention) == ran, "known by then"
    assert ran == 2 + 1 + 2, "two runs end at queries, keys and values"
    assert len(down) == 2, "the dense model's with its part, the sparse one's in its output"


class Doubling(nn.Module):
    """A block that changes what its part puts out in place."""

    def __init__(self):
        super().__init__()
        self.part = nn.Sequential(nn.Linear(3, 3))

    def forward(self, hidden):
        return self.part(hidden).mul_(2)


def test_what_the_block_changes_in_place_is_computed_anew():
    torch.manual_seed(0)
    module, batches = Doubling(), torch.randn(2, 4, 3)
    parts = PartOutputs(Block("block", module, {}), [module.part], 2)
    counted = calls_of(module.part)
    with torch.no_grad():
        for _ in range(3):
            parts.begin([])
            with parts.in_place():
                assert all(torch.equal(module(batch), 2 * module.part[0](batch)) for batch in batches)
    assert len(counted) == 6


def test_a_run_that_ended_early_tells_nothing():
    module = nn.Sequential(nn.Sequential(nn.Linear(3, 3)))
    parts = PartOutputs(Block("block", module, {}), list(module), 2)
    counted = calls_of(module[0])
    with torch.no_grad():
        for batches in (1, 2, 2):
            parts.begin([])
            with parts.in_place():
                for batch in range(batches):
                    module(torch.full((1, 3), float(batch)))
    assert len(counted) == 3


def test_undecided_parts_are_not_noted(llama, ids):
    with inference(llama):
        runner, block, sparse, dense, calls = paired(llama, ids)
        parts = PartOutputs(block, [block.module.self_attn, block.module.mlp], len(calls))
        owners = {p.name.rpartition(".")[2]: p.owner for p in block.pruned}
        parts.begin([owners[f"{name}_proj"] for name in "qkv"])
        assert parts.noted(block.module.self_attn.o_proj) is None
        parts.begin([owners[f"{name}_proj"] for name in "qkvo"])
        assert parts.noted(block.module.self_attn.o_proj) is block.module.self_attn
        assert parts.noted(block.module.mlp.up_proj) is None
        parts.begin(None)
        assert parts.noted(block.module.self_attn.o_proj) is None


def test_which_children_may_be_noted(ids):
    def children(model, shared=False):
        with inference(model):
            runner, block, _, dense, calls = paired(model, ids, batch_size=len(ids))
            calls = [Call(call.args, {**call.kwargs, "shared": {}}) for call in calls] if shared else calls
            with children_called_once(block, calls) as found:
                runner.output(block, dense, calls)
        return [name for name, child in block.module.named_children() if child in found]

    assert children(make_model("llama")) == ["self_attn", "mlp"]
    assert children(make_model("opt")) == ["self_attn"], "fc1 and fc2 are projections"
    assert children(make_model("mixtral")) == ["self_attn"], "experts run in ways of their own"
    assert children(make_model("llama"), shared=True) == [], "a part may hand on more than it returns"


def test_a_child_that_is_called_twice_is_not_noted():
    module = nn.Module()
    module.part = nn.Sequential(nn.Linear(3, 3))
    module.forward = lambda hidden: module.part(module.part(hidden))

    class Projection:
        module, expert = None, None

    Projection.module = module.part[0]
    with children_called_once(Block("block", module, {"part.0": Projection}), []) as found:
        module(torch.zeros(1, 3))
    assert found == []
