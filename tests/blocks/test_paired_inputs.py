import pytest
import torch
from conftest import make_model
from torch import nn
from trial_helpers import build_trials, state, unchanged

from optimum_neuronal.blocks.block_inputs import Stream, inference
from optimum_neuronal.blocks.paired_inputs import KeptOutputs, PairedRuns, _begin, _in_place
from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.model.projections import Block, TrialWeights, trial_weights
from optimum_neuronal.packed.change import Zeros
from optimum_neuronal.saliency.alps import ALPS


def paired(model, ids, batch_size=4, max_hidden_bytes=None, index=1, **chosen):
    """Runner, block, both streams and the calls of a model's block. The sparse model's stream differs."""
    trials = build_trials(find_decoder(model, **chosen), ALPS(), ids, len(ids), batch_size)
    inputs = trials.alignment_inputs()
    dense = Stream(inputs.hidden)
    sparse = Stream([states + 0.3 * states.flip(0) for states in dense])
    trials.runner.max_hidden_bytes = max_hidden_bytes
    return trials.runner, trials.decoder.blocks[index], sparse, dense, inputs.calls[index]


def order(model, ids, index=0, **chosen) -> list[list[str]]:
    """Names inside the block, stage by stage."""
    with inference(model):
        runner, block, _, dense, calls = paired(model, ids, index=index, **chosen)
        found = PairedRuns(runner, block, dense, dense, calls).stages
    return [[p.name.removeprefix(f"{block.name}.") for p in stage] for stage in found]


def every_other(projection):
    """Zeros in a checkerboard, whatever the weight."""
    rows, columns = projection.shape
    return Zeros((torch.arange(rows)[:, None] + torch.arange(columns)) % 2 == 1)


class TestStages:
    def test_of_separate_and_of_fused_and_transposed_weights(self, llama, ids):
        q, k, v, o = (f"self_attn.{name}_proj" for name in "qkvo")
        gate, up, down = (f"mlp.{name}_proj" for name in ("gate", "up", "down"))
        assert order(llama, ids) == order(llama, ids, index=2) == [[q, k, v], [o], [gate, up], [down]]
        assert order(llama, ids, ignore=["k_proj", "o_proj", "up_proj"]) == [[q, v], [gate], [down]], "of the others"
        expected = [["attn.c_attn"], ["attn.c_proj"], ["mlp.c_fc"], ["mlp.c_proj"]]
        assert order(make_model("gpt2"), ids) == expected

    def test_all_experts_run_together(self, ids):
        found = order(make_model("mixtral"), ids)
        experts = [[f"mlp.experts.{number}.{name}_proj" for number in range(4)] for name in ("gate_up", "down")]
        assert [sorted(stage) for stage in found[2:]] == experts
        assert [len(stage) for stage in found[:2]] == [3, 1]


def hooked(block, module, stream, calls) -> torch.Tensor:
    """What a module receives in whole forwards of the block: (all tokens, in)."""
    seen = []
    handle = module.register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    for states, call in zip(stream, calls):
        block.module(states, *call.args, **call.kwargs)
    handle.remove()
    return torch.cat([inputs.reshape(-1, inputs.shape[-1]) for inputs in seen])


@pytest.mark.parametrize("family", ["llama", "gpt2", "phi", "opt"])
def test_inputs_and_outputs_of_both_models_are_those_of_whole_forwards(family, ids):
    """What runs earlier in the block is sparse in the sparse model. Outputs are equal to the bit."""
    model = make_model(family)
    before = state(model)
    for max_hidden_bytes in (None, 0):
        with inference(model):
            runner, block, sparse, dense, calls = paired(model, ids, max_hidden_bytes=max_hidden_bytes)
            runs, solved = PairedRuns(runner, block, sparse, dense, calls), []
            for stage in runs.stages:
                norms = runs.inputs(stage, TrialWeights(solved, every_other))
                expected = hooked(block, stage[0].module, dense, calls)
                with trial_weights(solved, every_other):
                    received = hooked(block, stage[0].module, sparse, calls)
                assert set(norms) == {p.name for p in stage} and len(set(norms.values())) == 1
                statistic = norms[stage[0].name]
                torch.testing.assert_close(statistic.hessian, received.T @ received, rtol=1e-4, atol=1e-3)
                torch.testing.assert_close(statistic.cross, expected.T @ received, rtol=1e-4, atol=1e-3)
                assert not torch.allclose(statistic.cross, statistic.hessian, rtol=0.01)
                assert statistic.tokens == ids.numel() and statistic.value.shape[0] == len(ids)
                solved += stage
            with trial_weights(solved, every_other):
                assert all(map(torch.equal, runs.output(0), runner.output(block, sparse, calls)))
            assert all(map(torch.equal, runs.output(1), runner.output(block, dense, calls)))
        assert unchanged(model, before), "weights and hooks"


def test_experts_have_no_cross_statistic(ids):
    model = make_model("mixtral")
    before = state(model)
    with inference(model):
        runner, block, _, stream, calls = paired(model, ids, index=0)
        runs, solved = PairedRuns(runner, block, stream, stream, calls), []
        for stage in runs.stages:
            norms = runs.inputs(stage, TrialWeights(solved, every_other))
            assert all((norms[p.name].cross is None) == (p.expert is not None) for p in stage)
            if stage[0].expert is not None:
                with trial_weights(solved, every_other):
                    _, expected = runner.replay(block, stream, calls, ALPS.statistic)
                assert all(torch.equal(norms[p.name].hessian, expected[p.name].hessian) for p in stage)
            solved += stage
    assert unchanged(model, before)


def calls_of(module: nn.Module) -> list:
    """Grows with every call that a module's own forward receives."""
    seen, original = [], module.forward

    def counted(*args, **kwargs):
        seen.append(1)
        return original(*args, **kwargs)

    module.forward = counted
    return seen


def test_attention_runs_three_times_instead_of_eight(llama, ids):
    """In the dense model once, in the sparse one to its last projection, and once when that is solved."""
    with inference(llama):
        runner, block, sparse, dense, calls = paired(llama, ids, batch_size=len(ids))
        attention, down = calls_of(block.module.self_attn), calls_of(block.module.mlp.down_proj)
        runs, solved = PairedRuns(runner, block, sparse, dense, calls), []
        found = runs.stages
        attention.clear(), down.clear()
        for stage in found:
            runs.inputs(stage, TrialWeights(solved, every_other))
            solved += stage
        ran = len(attention)
        with trial_weights(solved, every_other):
            runs.output(0)
        runs.output(1)
    assert ran == len(attention) == 2 + 1 + 2, "two runs end at queries, keys and values; all is known by then"
    assert len(down) == 2, "the dense model's with its part, the sparse one's in its output"


class Doubling(nn.Module):
    """A block that changes what its part puts out in place."""

    def __init__(self):
        super().__init__()
        self.part = nn.Sequential(nn.Linear(3, 3))

    def forward(self, hidden):
        return self.part(hidden).mul_(2)


def test_what_the_block_changes_in_place_is_kept_as_it_was():
    torch.manual_seed(0)
    module, batches = Doubling(), torch.randn(2, 4, 3)
    kept = [KeptOutputs(module.part, Block("block", module, {}), batches=2)]
    counted = calls_of(module.part)
    with torch.no_grad():
        for _ in range(3):
            _begin(kept, set())
            with _in_place(kept):
                assert all(torch.equal(module(batch), 2 * module.part[0](batch)) for batch in batches)
    assert len(counted) == 2
