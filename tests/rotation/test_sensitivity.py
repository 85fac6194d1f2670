"""Fisher information against autograd through the whole model, with the same drawn labels."""

import pytest
import torch
from conftest import make_model
from turning import uneven

from optimum_neuronal.blocks.block_inputs import inference
from optimum_neuronal.blocks.runner import BlockRunner
from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.rotation.sensitivity import fisher_weights


def found_by(model, ids, seed=0, batch_size=4, **chosen):
    with inference(model):
        return fisher_weights(BlockRunner(find_decoder(model, **chosen), batch_size, quiet=True), ids, seed)


def plain(model, ids, seed=0) -> dict[str, float]:
    """One backward pass through the whole model."""
    decoder, outputs, handles = find_decoder(model), {}, []
    modules = {p.name: p.module for p in decoder.projections.values() if p.expert is None}
    modules |= {experts.name: experts.module for block in decoder.blocks for experts in block.experts}
    for name, module in modules.items():
        handles.append(
            module.register_forward_hook(lambda _m, _i, output, name=name: outputs.__setitem__(name, output))
        )
    logits = model.requires_grad_(True)(input_ids=ids, use_cache=False).logits
    for handle in handles:
        handle.remove()
    drawn = torch.rand(ids.shape, generator=torch.Generator().manual_seed(seed))
    labels = (logits.softmax(-1).cumsum(-1) < drawn[..., None]).sum(-1).clamp(max=logits.shape[-1] - 1)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    gradients = torch.autograd.grad(loss, list(outputs.values()))
    values = {
        name: float(gradient.square().sum() * output.detach().square().mean())
        for (name, output), gradient in zip(outputs.items(), gradients)
    }
    shares = {}
    for name, projection in decoder.projections.items():
        if projection.expert is None:
            shares[name] = values[name]
        else:  # two matrices in each of four experts
            shares[name] = values[projection.parent.rpartition(".")[0]] / 8
    mean = sum(shares.values()) / len(shares)
    return {name: value / mean for name, value in shares.items()}


@pytest.mark.parametrize("family", ["gemma", "phi3", "qwen2_moe", "llama4_text"])
def test_it_is_what_autograd_finds(family, ids):
    model = uneven(make_model(family))
    found, expected = found_by(model, ids, seed=3), plain(model, ids, seed=3)
    assert found.keys() == expected.keys() == find_decoder(model).projections.keys()
    assert found == pytest.approx(expected, rel=1e-3)
    assert sum(found.values()) / len(found) == pytest.approx(1)
    assert max(found.values()) > 1.2 > 0.8 > min(found.values()), "they differ"


def test_the_batch_size_changes_rounding_alone(ids):
    model = uneven(make_model("mixtral"))
    expected = found_by(model, ids, batch_size=12)
    for batch_size in (1, 5):
        assert found_by(model, ids, batch_size=batch_size) == pytest.approx(expected, rel=1e-3)
    assert found_by(model, ids, seed=1) != pytest.approx(expected, rel=1e-3), "labels are drawn"


def test_nothing_is_left_behind(llama, ids):
    llama.requires_grad_(False)
    found_by(llama, ids[:2])
    assert not any(module._forward_hooks for module in llama.modules())
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in llama.parameters())
