"""Contract tests run over the registry, so that a new method is tested by being there."""

import pytest
import torch

from optimum_neuronal.saliency import SALIENCIES


@pytest.mark.parametrize("name", SALIENCIES.names())
def test_contract(name):
    saliency = SALIENCIES.get(name)()
    weight = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    activation = torch.rand(7, generator=torch.Generator().manual_seed(1)) if saliency.uses_activations else None
    copy = weight.clone()
    score = saliency.score(weight, activation)
    assert score.shape == weight.shape and score.dtype == torch.float32
    assert torch.isfinite(score).all() and (score >= 0).all()
    assert torch.equal(weight, copy) and torch.equal(score, saliency.score(weight, activation))
    assert torch.equal(saliency.score(-weight, activation), score), "the sign of a weight does not matter"
