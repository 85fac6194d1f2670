"""Importance of features, by hand from the weights of the norms that read the stream, and what the refit makes of it."""

import pytest
import torch
from conftest import make_model, make_model_on_disk
from trial_helpers import state, unchanged

from optimum_neuronal.blocks.runner import BlockRunner
from optimum_neuronal.common.torch_state import inference
from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.pruning.importance import feature_importance


TWO = ["input_layernorm", "post_attention_layernorm"]
NORMS = {  # that read the stream in each block; the final one; what is added to its weights
    "llama": (TWO, "model.norm", 0),
    "mixtral": (TWO, "model.norm", 0),
    "gemma3_text": (["input_layernorm", "pre_feedforward_layernorm"], "model.norm", 1),  # others read a sublayer
    "phi": (["input_layernorm"], "model.final_layernorm", 0),  # parallel, with biases
    "olmo": (TWO, "model.norm", None),  # without weights
    "olmo2": ([""], "model.norm", 0),  # none: the block itself reads
    "granitemoehybrid": (TWO, "model.norm", 0),
}


def measure(model, ids) -> list[torch.Tensor]:
    with inference(model):
        return list(feature_importance(BlockRunner(find_decoder(model)), ids).values())


@pytest.mark.parametrize("family", NORMS)
def test_it_is_that_of_the_later_norms(family, ids, tmp_path):
    model, (inside, final, added) = make_model(family), NORMS[family]
    before, parts, ids = state(model), [], ids[:1]
    layers = [[layer.get_submodule(name) for name in inside] for layer in find_decoder(model).module.layers]
    for modules in [*layers, [model.get_submodule(final)]]:
        part = torch.zeros(32)
        for module in modules:
            seen = []
            with module.register_forward_pre_hook(lambda _module, args, seen=seen: seen.append(args[0].detach())):
                model(ids)
            weight = getattr(module, "weight", None)
            squares = torch.ones(32) if weight is None else (added + weight.detach()).square()
            part += squares / squares.mean() / seen[0].square().sum(dim=-1).median()
        parts.append(part)
    for index, found in enumerate(measure(model, ids)):
        expected = torch.stack(parts[index + 1 :]).sum(dim=0)
        assert torch.allclose(found, expected / expected.mean(), rtol=1e-3), index
    assert unchanged(model, before) and all(not module._forward_hooks for module in model.modules())
    on_disk = make_model_on_disk(tmp_path, family)
    assert all(torch.equal(*pair) for pair in zip(measure(on_disk, ids), measure(model, ids)))
