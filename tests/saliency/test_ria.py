import pytest
import torch

from optimum_neuronal.saliency import SALIENCIES


WEIGHT = torch.tensor([[1.0, -2.0], [-3.0, 0.5]])
ACTIVATION = torch.tensor([2.0, 4.0])


def test_ria():
    # shares of the rows: [1/3, 2/3], [6/7, 1/7]; of the columns: [1/4, 3/4], [4/5, 1/5]; times [2, 4] ** 0.5
    expected = [[(1 / 3 + 1 / 4) * 2**0.5, (2 / 3 + 4 / 5) * 2], [(6 / 7 + 3 / 4) * 2**0.5, (1 / 7 + 1 / 5) * 2]]
    score = SALIENCIES.get("ria")().score(WEIGHT, ACTIVATION)
    torch.testing.assert_close(score, torch.tensor(expected))
    assert torch.isfinite(SALIENCIES.get("ria")().score(torch.zeros(2, 2), ACTIVATION)).all()
    with pytest.raises(ValueError, match="power is -1"):
        SALIENCIES.get("ria")(power=-1)
