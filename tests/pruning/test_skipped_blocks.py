"""Blocks that text skips: the cross-attention to images of Llama 3.2 Vision."""

import pytest
import torch
import transformers
from kinds import DECODER, MLLAMA
from trial_helpers import state

from optimum_neuronal import NeuronALConfig, NeuronALPruner, keep_sparsity


BLOCKS = 5
SKIPPED = [(2, 4), (0, 3)]  # in the middle and last; first


def make_model(skipped):
    text = dict(DECODER, num_hidden_layers=BLOCKS, cross_attention_layers=list(skipped))
    torch.manual_seed(0)
    name = "MllamaForConditionalGeneration"
    config = transformers.MllamaConfig(**{**MLLAMA, "text_config": text}, architectures=[name])
    model = getattr(transformers, name)(config)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model.eval()


def layers(model):
    return model.model.language_model.layers


def linears(block):
    return [module for module in block.modules() if isinstance(module, torch.nn.Linear)]


@torch.no_grad()
def wanda(model, ids, skipped) -> None:
    """Set half of each row to zero, block by block, in the model's own forward."""
    for index, block in enumerate(layers(model)):
        if index in skipped:
            continue
        squares = {}

        def add(module, args, squares=squares):
            squares[module] = squares.get(module, 0) + args[0].float().square().sum(dim=(0, 1))

        hooks = [linear.register_forward_pre_hook(add) for linear in linears(block)]
        for sequence in ids:
            model(input_ids=sequence[None], use_cache=False)
        for hook in hooks:
            hook.remove()
        for linear in linears(block):
            score = linear.weight.abs() * squares[linear].sqrt()
            order = score.sort(dim=1, stable=True).indices[:, : score.shape[1] // 2]
            linear.weight.scatter_(1, order, 0.0)


def config(**fields):
    defaults = {"saliency": "wanda", "topup": "uniform", "num_samples": 8, "num_alignment_samples": 4}
    return NeuronALConfig(0.5, **{**defaults, **fields})


@pytest.mark.parametrize("skipped", SKIPPED, ids=str)
def test_masks_are_plain_wandas_and_skipped_blocks_stay_dense(skipped, ids, caplog):
    model, expected = make_model(skipped), make_model(skipped)
    wanda(expected, ids[:8], skipped)
    pruner = NeuronALPruner(config())
    pruner.prune(model, ids)
    for key, value in expected.state_dict().items():
        assert torch.equal(model.state_dict()[key], value), key
    names = [f"model.language_model.layers.{index}" for index in range(BLOCKS) if index not in skipped]
    assert list(pruner.report.blocks) == names and pruner.report.achieved_sparsity == 0.5
    (note,) = [message for message in caplog.messages if "Text skips 2 of 5 blocks" in message]
    assert all(f"layers.{index}" in note for index in skipped)


METHODS = {
    "neuronal": dict(topup="neuronal", topup_args=dict(block_lambdas=[0.1], row_lambdas=[0.0, 0.1])),
    "dense": dict(topup="neuronal", topup_args=dict(variant="printed", block_lambdas=[0.1], row_lambdas=[0.0, 0.1])),
    "authors": dict(topup="neuronal", topup_args=dict(variant="authors", block_lambdas=[0.1], row_lambdas=[0.0, 0.1])),
    "search": dict(topup="search", topup_args=dict(budget=24)),
    "alps": dict(saliency="alps"),
    "refit": dict(saliency="alps", refit_epochs=1, num_samples=16),
    "magnitude": dict(saliency="magnitude"),  # which needs no text
}


@pytest.mark.parametrize("method", METHODS)
def test_other_methods_pass_the_hidden_states_on(method, ids):
    skipped = SKIPPED[0]
    model = make_model(skipped)
    before = state(model)
    pruner = NeuronALPruner(config(**METHODS[method]))
    pruner.prune(model, torch.cat([ids, ids]))
    assert pruner.report.achieved_sparsity == pytest.approx(0.5, abs=0.02) and len(pruner.report.blocks) == 3
    for index in skipped:
        prefix = f"model.language_model.layers.{index}."
        assert all(torch.equal(v, before[k]) for k, v in state(model).items() if k.startswith(prefix))
    assert keep_sparsity(model).sparsity == pytest.approx(pruner.report.achieved_sparsity)


def test_only_skipped_blocks_are_an_error(ids):
    with pytest.raises(ValueError, match="No projection is left to prune: text skips"):
        NeuronALPruner(config(targets=["cross_attn"])).prune(make_model((2, 4)), ids)
