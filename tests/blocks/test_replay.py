import pytest
import torch
from conftest import make_model
from forward import squared_norms, token_counts
from torch import nn

from optimum_neuronal import NeuronALConfig, NeuronALPruner
from optimum_neuronal.blocks.block_inputs import Call, capture_inputs, inference
from optimum_neuronal.blocks.runner import replay
from optimum_neuronal.blocks.statistics import Hessian, SquaredNorms
from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.model.projections import Block, Projection
from optimum_neuronal.saliency.plan import row_counts


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


def test_every_batch_by_its_own_call_and_inputs_are_recorded_over_all(block):
    outputs, recorded = run(block, HIDDEN, CALLS, record=None)
    assert [output.tolist() for output in outputs] == [[[[17.0, 18.0]]], [[[29.0, 26.0]]]]
    assert recorded == {}
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


CPU = torch.device("cpu")
MIXTURES = ("deepseek_v3", "gpt_oss", "granitemoe", "jamba", "llama4_text", "mixtral", "olmoe", "qwen3_moe")


def recorded_norms(model, ids, batch_size=5, ignore=None):
    with inference(model):
        decoder = find_decoder(model, ignore=ignore)
        inputs = capture_inputs(decoder, ids, batch_size, CPU)
        hidden, norms = inputs.hidden, {}
        for block, calls in zip(decoder.blocks, inputs.calls):
            hidden, recorded = replay(block, hidden, calls)
            norms.update(recorded)
    return decoder, norms


def starved_model():
    """A Mixtral whose tokens all go to expert 0 or 1, one to each side of a plane."""
    model = make_model("mixtral", num_experts_per_tok=1)
    for layer in model.model.layers:
        layer.mlp.gate.weight.data[1] = -layer.mlp.gate.weight.data[0]
        layer.mlp.gate.weight.data[2:] = 0
    return model


@pytest.mark.parametrize("family", MIXTURES)
def test_every_expert_is_measured_on_the_tokens_routed_to_it(family, ids):
    """Against what transformers' own loop over the experts multiplies, sequence by sequence."""
    model = make_model(family)
    decoder, norms = recorded_norms(model, ids)
    tokens = token_counts(model, ids, decoder.projections)
    for name, expected in squared_norms(model, ids, decoder.projections).items():
        torch.testing.assert_close(norms[name].value, expected)
        assert norms[name].tokens == tokens[name], name
    experts = [p for p in decoder.projections.values() if p.expert is not None]
    assert experts and len({tokens[p.name] for p in experts}) > 3, "not all experts receive the same tokens"


@pytest.mark.parametrize("topup", ["uniform", "neuronal"])
def test_starved_experts_are_pruned_by_magnitude_and_named(ids, topup):
    model = starved_model()
    dense = model.model.layers[1].mlp.experts.gate_up_proj[3].detach().clone()
    lambdas = {"block_lambdas": [0.1], "row_lambdas": [0.1]} if topup == "neuronal" else {}
    fields = {"num_samples": 12, "num_alignment_samples": 4, "min_expert_tokens": 1}
    pruner = NeuronALPruner(NeuronALConfig(0.5, "wanda", topup=topup, topup_args=lambdas, **fields))
    pruner.prune(model, ids)
    report = pruner.report
    assert report.starved_experts == [
        f"model.layers.{layer}.mlp.experts.{expert}.{part}"
        for layer in range(3)
        for part in ("gate_up_proj", "down_proj")
        for expert in (2, 3)
    ]
    assert "12 projections of experts that received fewer than 1 tokens" in str(report)
    sparse = model.model.layers[1].mlp.experts.gate_up_proj[3]
    sparsity = report.projections["model.layers.1.mlp.experts.3.gate_up_proj"]
    assert sparsity["smallest_row"] == pytest.approx(sparsity["largest_row"], abs=1 / 32), "no deviation to go by"
    for row, count in enumerate(row_counts(sparsity["sparsity"], dense.shape)):
        kept, gone = dense[row][sparse[row] != 0].abs(), dense[row][sparse[row] == 0].abs()
        assert gone.max() <= kept.min() and abs(len(gone) - count) <= 1
