import math

import pytest
import torch
from conftest import make_model
from turning import rotated_of, uneven

from optimum_neuronal.blocks.block_inputs import inference
from optimum_neuronal.blocks.runner import BlockRunner
from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.rotation.learning import Rotation, cayley, fisher_weights
from optimum_neuronal.rotation.merging import Originals, Rotations

from .test_objective import objective


def learn(model, ids, batch_size=4, seed=0, **fields):
    rotated = rotated_of(model)
    originals, runner = Originals(rotated), BlockRunner(rotated.decoder, batch_size, quiet=True)
    with inference(model):
        originals.merge(Rotations.identity(rotated))
        rotation = Rotation(**{"cut": 0.6, "steps": 20, "fisher_samples": 4, **fields})
        found, losses = rotation.learn(rotated, runner, ids, seed)
        fisher = fisher_weights(runner, ids[:4], seed)
        terms = rotation.find_terms(rotated, runner, ids, fisher)
    return rotated, found, losses, terms


def test_cayley_gives_rotations():
    """Orthogonal ones of determinant 1, of any matrix; by hand in the plane: the angle is 2 arctan t."""
    found = cayley(torch.randn(5, 3, 8, 8, dtype=torch.float64))
    assert torch.allclose(found @ found.mT, torch.eye(8, dtype=torch.float64).expand_as(found), atol=1e-12)
    assert torch.allclose(torch.linalg.det(found), torch.ones(5, 3, dtype=torch.float64))
    assert torch.equal(cayley(torch.zeros(4, 4)), torch.eye(4))
    angle = 2 * math.atan(0.3)
    turned = torch.tensor([[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]])
    assert torch.allclose(cayley(torch.tensor([[0.0, 0.3], [0.0, 0.0]])), turned)


@pytest.mark.parametrize("family", ["mistral", "mixtral", "gemma2"])
def test_learning_lowers_the_objective(family, ids):
    rotated, found, losses, terms = learn(uneven(make_model(family)), ids)
    unrotated, learned = objective(terms, Rotations.identity(rotated), 0.6), objective(terms, found, 0.6)
    assert len(losses) == 20 and losses[0] == pytest.approx(unrotated, rel=1e-5)
    assert learned < 0.97 * unrotated and learned == pytest.approx(losses[-1], rel=1e-2)
    for rotation in [*found.heads, *([] if found.stream is None else [found.stream])]:
        assert rotation.dtype == torch.float64 and not rotation.requires_grad
        identity = torch.eye(rotation.shape[-1], dtype=torch.float64)
        assert torch.allclose(rotation @ rotation.mT, identity.expand_as(rotation), atol=1e-12)
        assert not torch.allclose(rotation, identity.expand_as(rotation), atol=1e-3)


def test_the_batch_size_changes_rounding_alone(ids):
    results = [learn(uneven(make_model("llama")), ids, batch_size=size)[1] for size in (1, 5, 12)]
    for found in results[1:]:
        for name, rotation in found.tensors().items():
            assert torch.allclose(rotation, results[0].tensors()[name], atol=1e-3), name


def found_by(model, ids, seed=0, batch_size=4, **chosen):
    with inference(model):
        return fisher_weights(BlockRunner(find_decoder(model, **chosen), batch_size, quiet=True), ids, seed)


def plain(model, ids, seed=0) -> dict[str, float]:
    """Fisher information by one backward pass through the whole model, with the same drawn labels."""
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
def test_fisher_information_is_what_autograd_finds(family, ids):
    model = uneven(make_model(family))
    found, expected = found_by(model, ids, seed=3), plain(model, ids, seed=3)
    assert found.keys() == expected.keys() == find_decoder(model).projections.keys()
    assert found == pytest.approx(expected, rel=1e-3)
    assert sum(found.values()) / len(found) == pytest.approx(1)
    assert max(found.values()) > 1.2 > 0.8 > min(found.values()), "they differ"


def test_the_batch_size_changes_fisher_information_by_rounding_alone(ids):
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
