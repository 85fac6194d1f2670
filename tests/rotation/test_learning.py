import math

import pytest
import torch
from conftest import make_model
from turning import rotated_of, uneven

from optimum_neuronal.blocks.block_inputs import inference
from optimum_neuronal.blocks.runner import BlockRunner
from optimum_neuronal.rotation.learning import Rotation, cayley
from optimum_neuronal.rotation.merging import Originals, Rotations
from optimum_neuronal.rotation.sensitivity import fisher_weights

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
