"""The coverage matrix: what every supported family must do, on tiny models of the installed transformers."""

import pytest
import torch
from conftest import make_model
from families import FAMILIES
from profiles import by_day
from transformers import AutoModelForCausalLM
from trial_helpers import state

from optimum_neuronal import NeuronALConfig, NeuronALPruner
from optimum_neuronal.blocks.block_inputs import Stream, first_output
from optimum_neuronal.blocks.runner import BlockRunner
from optimum_neuronal.common.torch_state import inference
from optimum_neuronal.model.find_blocks import find_decoder


@pytest.fixture(params=FAMILIES)
def family(request) -> str:
    return request.param


def test_every_projection_and_nothing_else(family):
    model = make_model(family)
    decoder = find_decoder(model)
    assert len(decoder.blocks) == model.config.get_text_config().num_hidden_layers
    for index, block in enumerate(decoder.blocks):
        assert model.get_submodule(block.name) is block.module
        local = [name.removeprefix(block.name + ".") for name in block.projections]
        assert sorted(local) == FAMILIES[family].expected(index)
        for name, projection in block.projections.items():
            stem, _expert, parameter = name.rsplit(".", 2)
            owner = f"{name}.weight" if projection.expert is None else f"{stem}.{parameter}"
            assert model.get_parameter(owner) is projection.owner


def test_replay_is_bit_equal_to_the_models_forward_and_leaves_nothing_behind(family, ids):
    model = make_model(family)
    before = {name: set(module.__dict__) for name, module in model.named_modules()}
    with inference(model):
        decoder = find_decoder(model)
        runner = BlockRunner(decoder, 3)
        inputs = runner.capture(ids[:3])
        stream = Stream(inputs.hidden)
        expected = {}
        hooks = [
            block.module.register_forward_hook(lambda module, _, output: expected.update({module: output}))
            for block in decoder.blocks
        ]
        decoder.module(ids[:3], use_cache=False)
        for hook in hooks:
            hook.remove()
        # Experts run one by one, and all others bit for bit as in the model.
        tolerance = {} if any(block.experts for block in decoder.blocks) else {"atol": 0, "rtol": 0}
        for block, calls in zip(decoder.blocks, inputs.calls):
            stream = runner.output(block, stream, calls)
            own = first_output(expected[block.module])
            torch.testing.assert_close(stream.batches[0], own, **tolerance)
        last = decoder.module(ids[:3], use_cache=False).last_hidden_state
        if family not in ("gemma4_text", "openai-gpt"):  # the first one's is not found, the second one has none
            assert torch.equal(inputs.final_norm(own), last)
    for name, module in model.named_modules():
        assert not module._forward_pre_hooks and not module._forward_hooks and set(vars(module)) == before[name]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["gpt_oss", "mixtral", "qwen3_moe"])
def test_replay_rounds_as_the_model_does(family, dtype, seed, ids):
    """Experts, which run one by one while they are recorded. It raises otherwise."""
    model = make_model(family, seed=seed).to(dtype)
    with inference(model):
        BlockRunner(find_decoder(model)).check_replay(ids[:1])


SAVED = ("gpt2", "llama", "llama4_text", "mixtral", "phi", "qwen3_5_moe_text")  # by day


@pytest.mark.parametrize("topup", ["search", "neuronal"])
@pytest.mark.parametrize("family", by_day(FAMILIES, *SAVED))
def test_prune_save_and_reload(family, topup, ids, tmp_path):
    model = make_model(family)
    before, arguments = state(model), {"block_lambdas": [0.05, 0.15], "row_lambdas": [0, 0.1]}
    if topup == "search":
        arguments = {"budget": 24}  # both kinds of rounds, and rows
    sizes = {"num_samples": 12, "num_alignment_samples": 4, "min_expert_tokens": 8}
    pruner = NeuronALPruner(NeuronALConfig(0.7, "wanda", topup=topup, topup_args=arguments, **sizes))
    pruner.prune(model, ids)
    assert pruner.report.achieved_sparsity == pytest.approx(0.7, abs=1e-3)

    owners = {}
    for projection in find_decoder(model).projections.values():
        owners.setdefault(id(projection.owner), []).append(projection)
    for key, parameter in model.named_parameters():
        if id(parameter) not in owners:
            assert torch.equal(parameter, before[key]), f"{key} is no projection"
        else:
            kept = parameter != 0
            assert torch.equal(parameter[kept], before[key][kept])
            zeros = (~kept).sum().item() / parameter.numel()
            assert zeros == pytest.approx(0.7, abs=0.2) if topup == "neuronal" else 0 < zeros < 1

    model.save_pretrained(tmp_path)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert reloaded.config.sparsity_config == model.config.sparsity_config
    assert torch.equal(reloaded(ids).logits, model(ids).logits)
