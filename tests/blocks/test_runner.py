import copy
import io
import sys
from types import SimpleNamespace

import pytest
import torch
from by_hand import make_block
from conftest import make_model
from forward import squared_norms, token_counts
from torch import nn
from trial_helpers import state, unchanged

from optimum_neuronal.blocks.block_inputs import BlockInputs, Call, Stream
from optimum_neuronal.blocks.runner import BlockRunner, output_with
from optimum_neuronal.blocks.statistics import Hessian, SquaredNorms
from optimum_neuronal.common import notes
from optimum_neuronal.common.torch_state import inference
from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.model.projections import Block, Projection


def make_runner(**options):
    """Of three blocks, which do nothing by themselves: the tests say what a visit does."""
    decoder = SimpleNamespace(blocks=[make_block([[1.0]], name=f"b{index}") for index in range(3)])
    return BlockRunner(decoder, **options)


def make_inputs(value=1.0):
    return BlockInputs([torch.full((1, 1, 1), value)], [["call 0"], ["call 1"], ["call 2"]])


def adding(*increments):
    """A visit that adds a number to each stream, and notes the blocks that it sees."""
    visited = []

    def visit(index, block, calls, streams):
        visited.append((index, block.name, calls))
        return [Stream([states + more for states in stream]) for stream, more in zip(streams, increments)]

    visit.visited = visited
    return visit


def test_every_block_is_visited_in_order_and_streams_flow():
    visit, inputs = adding(1, 10), make_inputs()
    streams = make_runner().run(inputs, 2, visit)
    assert visit.visited == [(0, "b0", ["call 0"]), (1, "b1", ["call 1"]), (2, "b2", ["call 2"])]
    assert [stream.batches[0].item() for stream in streams] == [4, 31]
    assert [states.item() for states in inputs.hidden] == [1]


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("stderr", [Terminal, io.StringIO])
def test_a_bar_and_one_line_without_a_terminal(stderr, monkeypatch):
    """A run without a label shows nothing."""
    monkeypatch.setattr(sys, "stderr", stderr())
    runner = make_runner()
    for label in ("Search", "Search", None):
        runner.run(make_inputs(), 1, adding(1), label)
    written = sys.stderr.getvalue()
    if stderr is Terminal:
        assert "Search" in written and "\x1b" not in written and "\n" not in written
    else:
        assert written == "Search\n", "once for all runs of a step"


def test_quarters_of_a_step_in_a_log(monkeypatch):
    """With a clock that a block takes ten minutes of, but for the first one."""
    shown, seconds = io.StringIO(), iter([0, 5, 605, 1205, 1805])
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setattr(notes.time, "perf_counter", lambda: next(seconds))
    assert list(notes.progress(range(4), "pruning", "block")) == [0, 1, 2, 3]
    assert shown.getvalue().split("\n") == [
        "pruning",
        "pruning: 50% after 10.1 minutes, 10.1 minutes left",
        "pruning: 75% after 20.1 minutes, 6.7 minutes left",
        "pruning: 100% after 30.1 minutes",
        "",
    ]


def test_forwards_are_counted_by_sequence(llama, ids):
    with inference(llama):
        runner = BlockRunner(find_decoder(llama), batch_size=5)
        inputs = runner.capture(ids)
        assert runner.block_forwards == 0, "a capture runs no block"
        block, stream, calls = runner.decoder.blocks[0], Stream(inputs.hidden), inputs.calls[0]
        output = runner.output(block, stream, calls)
        assert runner.block_forwards == 12 and output.sequences == 12
        norms = runner.inputs_of(block, stream, calls)
        assert runner.block_forwards == 24 and norms.keys() == block.projections.keys()
        expected = runner.replay(block, stream, calls)[1]
    assert all(torch.equal(norms[name].value, expected[name].value) for name in expected), "down_proj did not run"


def test_a_projection_that_feeds_its_own_block_is_found(llama, ids):
    """As in a block of two MLPs: the first down_proj feeds the second."""
    mlp = llama.model.layers[1].mlp
    llama.model.layers[1].mlp = nn.Sequential(mlp, copy.deepcopy(mlp))
    with pytest.raises(ValueError, match="layers.1.mlp.1.gate_proj reads the output of a projection whose role"):
        check(llama, ids)


def check(model, ids):
    with inference(model):
        runner = BlockRunner(find_decoder(model))
        runner.check_replay(ids[:1])
    return runner.wrap


def test_blocks_return_hidden_states_in_their_own_form_and_the_check_leaves_the_model_alone(any_model, ids):
    before, hidden = state(any_model), torch.zeros(1, 2, 32)
    wrapped = check(any_model, ids)(hidden)
    assert (wrapped[0] if isinstance(wrapped, tuple) else wrapped) is hidden
    assert unchanged(any_model, before) and not any(module._forward_hooks for module in any_model.modules())


def test_a_block_that_keeps_a_state_raises(llama, ids):
    layer, calls = llama.model.layers[1], []
    original = type(layer).forward

    def stateful(self, hidden_states, **kwargs):
        calls.append(1)
        return original(self, hidden_states, **kwargs) + 0.1 * len(calls)

    layer.__class__ = type("LlamaDecoderLayer", (type(layer),), {"forward": stateful})
    match = r"outputs \(LlamaDecoderLayer\) don't match the model's forward pass: the largest difference is 0\.\d+.*"
    match += r"register_architecture\('llama', Architecture\(blocks='layers'\)\).*another thread uses the model, wait"
    with pytest.raises(ValueError, match=match):
        check(llama, ids)


def test_a_projection_that_never_runs_raises(llama, ids):
    llama.model.layers[1].mlp.fc1 = torch.nn.Linear(32, 48)
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.fc1 is not used in the model's forward"):
        check(llama, ids)


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


STATES = [torch.tensor([[[1.0, 2.0]]]), torch.tensor([[[3.0, 0.0]]])]  # two batches of one sequence of one token
CALLS = [Call((10.0,), {}), Call((), {"added": 20.0})]


def run_block(block, hidden, calls, *arguments, **options):
    runner = BlockRunner(SimpleNamespace(blocks=[block]))
    with torch.no_grad():
        output, recorded = runner.replay(block, Stream(hidden), calls, *arguments, **options)
    return output.batches, recorded


def test_every_batch_by_its_own_call_and_inputs_are_recorded_over_all(block):
    outputs, recorded = run_block(block, STATES, CALLS, statistic=None)
    assert [output.tolist() for output in outputs] == [[[[17.0, 18.0]]], [[[29.0, 26.0]]]]
    assert recorded == {}
    recorded = run_block(block, STATES, CALLS)[1]
    assert recorded["up"].value.tolist() == [[1, 4], [9, 0]]
    assert recorded["down"].value.tolist() == [[4, 16], [36, 0]]
    assert type(recorded["up"]) is SquaredNorms and recorded["up"].tokens == 2
    assert run_block(block, STATES, CALLS, Hessian)[1]["up"].hessian.tolist() == [[10, 2], [2, 4]]


def test_what_is_skipped_is_zero_and_still_recorded(block):
    outputs, recorded = run_block(block, STATES, CALLS, skipped=[block.projections["down"]])
    assert [output.tolist() for output in outputs] == [[[[11.0, 12.0]]], [[[23.0, 20.0]]]]
    assert recorded["down"].value.tolist() == [[4, 16], [36, 0]]


def test_what_blocks_share_is_kept_by_batch(block):
    """Every batch has one container, whatever the other batch did with it."""
    shared = {}
    calls = [Call((0.0,), {"shared": shared}) for _ in STATES]
    hidden = [states.clone() for states in STATES]
    for states in hidden:
        states.shared_contents = {id(shared): {}}
    first = run_block(block, hidden, calls, statistic=None)[0]
    assert [output.shared_contents[id(shared)] for output in first] == [{"calls": 1}] * 2
    second = run_block(block, first, calls, statistic=None)[0]
    assert [output.shared_contents[id(shared)] for output in second] == [{"calls": 2}] * 2


MIXTURES = ("deepseek_v3", "gpt_oss", "granitemoe", "jamba", "llama4_text", "mixtral", "olmoe", "qwen3_moe")


@pytest.mark.parametrize("family", MIXTURES)
def test_every_expert_is_measured_on_the_tokens_routed_to_it(family, ids):
    """Against what transformers' own loop over the experts multiplies, sequence by sequence."""
    model, norms = make_model(family), {}
    with inference(model):
        decoder = find_decoder(model)
        runner = BlockRunner(decoder, 5)
        inputs = runner.capture(ids)
        stream = Stream(inputs.hidden)
        for block, calls in zip(decoder.blocks, inputs.calls):
            stream, recorded = runner.replay(block, stream, calls)
            norms.update(recorded)
    tokens = token_counts(model, ids, decoder.projections)
    for name, expected in squared_norms(model, ids, decoder.projections).items():
        torch.testing.assert_close(norms[name].value, expected)
        assert norms[name].tokens == tokens[name], name
    experts = [p for p in decoder.projections.values() if p.expert is not None]
    assert experts and len({tokens[p.name] for p in experts}) > 3, "not all experts receive the same tokens"


def test_an_output_with_other_weights_reads_what_blocks_shared_for_its_batch(block):
    shared = {}
    call, hidden = Call((0.0,), {"shared": shared}), STATES[0].clone()
    hidden.shared_contents = {id(shared): {"calls": 5}}
    shared["calls"] = 9  # of another batch
    output_with(block, dict(block.module.named_parameters()), hidden, call)
    assert shared == {"calls": 6}
