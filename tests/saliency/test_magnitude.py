import torch

from optimum_neuronal.saliency import SALIENCIES


WEIGHT = torch.tensor([[1.0, -2.0], [-3.0, 0.5]])


def test_magnitude():
    assert SALIENCIES.get("magnitude")().score(WEIGHT).tolist() == [[1, 2], [3, 0.5]]
