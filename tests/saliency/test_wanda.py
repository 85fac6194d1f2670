import torch

from optimum_neuronal.saliency import SALIENCIES


WEIGHT = torch.tensor([[1.0, -2.0], [-3.0, 0.5]])
ACTIVATION = torch.tensor([2.0, 4.0])


def test_wanda():
    assert SALIENCIES.get("wanda")().score(WEIGHT, ACTIVATION).tolist() == [[2, 8], [6, 2]]
