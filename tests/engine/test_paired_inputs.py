"""When the projections of a block run, and what they receive in both models: against plain hooks on whole forwards."""

import pytest
import torch
from conftest import FEW, make_model
from sweeps import build_sweep, state, unchanged

from optimum_neuronal.engine.capture import inference
from optimum_neuronal.engine.paired_inputs import PairedRuns, stages
from optimum_neuronal.engine.streams import Stream
from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.model.trial import TrialWeights, trial_weights
from optimum_neuronal.saliency.alps import ALPS
from optimum_neuronal.sparsity.masks import Zeros


def sweep_of(model, ids, batch_size=4, **chosen):
    return build_sweep(find_decoder(model, **chosen), ALPS(), ids, len(ids), batch_size)


def order(model, ids, index=0, **chosen) -> list[list[str]]:
    """Names inside the block, stage by stage."""
    with inference(model):
        sweep = sweep_of(model, ids, **chosen)
        inputs, block = sweep.engine.alignment_inputs(), sweep.decoder.blocks[index]
        found = stages(sweep.engine.runner, block, Stream(inputs.hidden), inputs.calls[index])
    return [[p.name.removeprefix(f"{block.name}.") for p in stage] for stage in found]


def every_other(projection):
    """Zeros in a checkerboard, whatever the weight."""
    rows, columns = projection.shape
    return Zeros((torch.arange(rows)[:, None] + torch.arange(columns)) % 2 == 1)


class TestStages:
    def test_of_a_llama(self, llama, ids):
        q, k, v, o = (f"self_attn.{name}_proj" for name in "qkvo")
        gate, up, down = (f"mlp.{name}_proj" for name in ("gate", "up", "down"))
        assert order(llama, ids) == [[q, k, v], [o], [gate, up], [down]]
        assert order(llama, ids, index=2) == [[q, k, v], [o], [gate, up], [down]]

    def test_of_fused_and_transposed_weights(self, ids):
        expected = [["attn.c_attn"], ["attn.c_proj"], ["mlp.c_fc"], ["mlp.c_proj"]]
        assert order(make_model("gpt2"), ids) == expected

    def test_all_experts_run_together(self, ids):
        found = order(make_model("mixtral"), ids)
        experts = [[f"mlp.experts.{number}.{name}_proj" for number in range(4)] for name in ("gate_up", "down")]
        assert [sorted(stage) for stage in found[2:]] == experts
        assert [len(stage) for stage in found[:2]] == [3, 1]

    def test_a_shared_expert_beside_the_others(self, ids):
        found = order(make_model("qwen2_moe"), ids)
        together = next(stage for stage in found if "mlp.shared_expert.gate_proj" in stage)
        assert "mlp.shared_expert.up_proj" in together
        place = {name: number for number, stage in enumerate(found) for name in stage}
        assert place["mlp.experts.0.gate_up_proj"] < place["mlp.experts.0.down_proj"]
        assert place["mlp.shared_expert.gate_proj"] < place["mlp.shared_expert.down_proj"]
        kinds = [{".experts." in name for name in stage} for stage in found]
        assert all(len(kind) == 1 for kind in kinds), "experts do not receive what a dense projection does"

    def test_what_is_left_out_is_in_no_stage(self, llama, ids):
        found = order(llama, ids, ignore=["k_proj", "o_proj", "up_proj"])
        q, v = (f"self_attn.{name}_proj" for name in "qv")
        assert found == [[q, v], ["mlp.gate_proj"], ["mlp.down_proj"]]

    @pytest.mark.parametrize("family", FEW)
    def test_all_are_in_one_stage_each(self, family, ids):
        model = make_model(family)
        for index, block in enumerate(find_decoder(model).blocks):
            found = [f"{block.name}.{name}" for stage in order(model, ids[:5], index) for name in stage]
            assert sorted(found) == sorted(block.pruned_names)


def hooked(block, module, stream, calls) -> torch.Tensor:
    """What a module receives in whole forwards of the block: (all tokens, in)."""
    seen = []
    handle = module.register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    for states, call in zip(stream, calls):
        block.module(states, *call.args, **call.kwargs)
    handle.remove()
    return torch.cat([inputs.reshape(-1, inputs.shape[-1]) for inputs in seen])


@pytest.mark.parametrize("family", ["llama", "gpt2", "phi", "opt"])
def test_both_models_inputs_are_those_of_whole_forwards(family, ids):
    """The sparse model's stream differs from the dense one's, and what runs earlier in the block is sparse in it."""
    model = make_model(family)
    before = state(model)
    with inference(model):
        sweep = sweep_of(model, ids)
        runner, block = sweep.engine.runner, sweep.decoder.blocks[1]
        inputs = sweep.engine.alignment_inputs()
        calls, dense = inputs.calls[1], Stream(inputs.hidden)
        noise = (0.3 * torch.randn(states.shape, generator=torch.Generator().manual_seed(0)) for states in dense)
        sparse = Stream([states + own for states, own in zip(dense, noise)])
        solved = []
        runs = PairedRuns(runner, block, sparse, dense, calls)
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
    assert unchanged(model, before), "weights and hooks"


def test_of_experts_only_the_sparse_model_is_told(ids):
    model = make_model("mixtral")
    before = state(model)
    with inference(model):
        sweep = sweep_of(model, ids)
        runner, block = sweep.engine.runner, sweep.decoder.blocks[0]
        inputs = sweep.engine.alignment_inputs()
        stream, calls, solved = Stream(inputs.hidden), inputs.calls[0], []
        runs = PairedRuns(runner, block, stream, stream, calls)
        for stage in runs.stages:
            norms = runs.inputs(stage, TrialWeights(solved, every_other))
            assert all((norms[p.name].cross is None) == (p.expert is not None) for p in stage)
            if stage[0].expert is not None:
                with trial_weights(solved, every_other):
                    _, expected = runner.replay(block, stream, calls, sweep.saliency.statistic)
                assert all(torch.equal(norms[p.name].hessian, expected[p.name].hessian) for p in stage)
            solved += stage
    assert unchanged(model, before)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_no_bit_depends_on_the_batches(family, ids):
    found = []
    for batch_size in (1, 5):
        model = make_model(family)
        with inference(model):
            sweep = sweep_of(model, ids, batch_size)
            inputs, block = sweep.engine.alignment_inputs(), sweep.decoder.blocks[0]
            stream, calls = Stream(inputs.hidden), inputs.calls[0]
            runs = PairedRuns(sweep.engine.runner, block, stream, stream, calls)
            stage = runs.stages[-1]
            norms = runs.inputs(stage, TrialWeights([p for p in block.pruned if p not in stage], every_other))
            found.append(norms[stage[0].name])
    assert torch.equal(found[0].hessian, found[1].hessian) and torch.equal(found[0].cross, found[1].cross)


def test_a_failure_leaves_no_hook_and_no_sparse_weight(llama, ids, monkeypatch):
    before = state(llama)
    with inference(llama):
        sweep = sweep_of(llama, ids)
        runner, block = sweep.engine.runner, sweep.decoder.blocks[0]
        inputs = sweep.engine.alignment_inputs()
        stream, calls = Stream(inputs.hidden), inputs.calls[0]
        runs = PairedRuns(runner, block, stream, stream, calls)
        solved = TrialWeights(runs.stages[0], every_other)
        with monkeypatch.context() as patch:
            patch.setattr(block.module.self_attn, "forward", lambda *_args, **_kwargs: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                runs.inputs(runs.stages[1], solved)
        assert unchanged(llama, before)
    assert unchanged(llama, before)


def test_runs_end_at_the_stage_and_are_counted(llama, ids):
    """What the block would do behind the inputs of a stage is not done."""
    with inference(llama):
        sweep = sweep_of(llama, ids)
        runner, block = sweep.engine.runner, sweep.decoder.blocks[0]
        inputs = sweep.engine.alignment_inputs()
        stream, calls = Stream(inputs.hidden), inputs.calls[0]
        runs = PairedRuns(runner, block, stream, stream, calls)
        ran = []
        handle = block.module.mlp.register_forward_pre_hook(lambda *_args: ran.append(1))
        runner.block_forwards = 0
        runs.inputs(runs.stages[0], TrialWeights([], every_other))
        handle.remove()
    assert not ran and runner.block_forwards == len(ids) // 2, "two, a quarter each"
