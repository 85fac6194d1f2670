import torch

from optimum_neuronal.saliency import SALIENCIES


WEIGHT = torch.tensor([[1.0, -2.0], [-3.0, 0.5]])
ACTIVATION = torch.tensor([2.0, 4.0])


def test_multiflow():
    # |W| a = [[2, 8], [6, 2]]: means over the rows 5 and 4, over the columns 4 and 5
    expected = [[1 * 5 * 4, 2 * 5 * 5], [3 * 4 * 4, 0.5 * 4 * 5]]
    assert SALIENCIES.get("multiflow")().score(WEIGHT, ACTIVATION).tolist() == expected
