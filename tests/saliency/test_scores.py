"""Saliencies that only score, by hand."""

import pytest
import torch

from optimum_neuronal.saliency import SALIENCIES


WEIGHT = torch.tensor([[1.0, -2.0], [-3.0, 0.5]])
ACTIVATION = torch.tensor([2.0, 4.0])


def test_magnitude():
    assert SALIENCIES.get("magnitude")().score(WEIGHT).tolist() == [[1, 2], [3, 0.5]]


def test_wanda():
    assert SALIENCIES.get("wanda")().score(WEIGHT, ACTIVATION).tolist() == [[2, 8], [6, 2]]


def test_multiflow():
    # |W| a = [[2, 8], [6, 2]]: means over the rows 5 and 4, over the columns 4 and 5
    expected = [[1 * 5 * 4, 2 * 5 * 5], [3 * 4 * 4, 0.5 * 4 * 5]]
    assert SALIENCIES.get("multiflow")().score(WEIGHT, ACTIVATION).tolist() == expected


def test_ria():
    # shares of the rows: [1/3, 2/3], [6/7, 1/7]; of the columns: [1/4, 3/4], [4/5, 1/5]; times [2, 4] ** 0.5
    expected = [[(1 / 3 + 1 / 4) * 2**0.5, (2 / 3 + 4 / 5) * 2], [(6 / 7 + 3 / 4) * 2**0.5, (1 / 7 + 1 / 5) * 2]]
    ria = SALIENCIES.get("ria")
    torch.testing.assert_close(ria().score(WEIGHT, ACTIVATION), torch.tensor(expected))
    assert torch.isfinite(ria().score(torch.zeros(2, 2), ACTIVATION)).all()
    with pytest.raises(ValueError, match="power is -1"):
        SALIENCIES.make("ria", "saliency_args", {"power": -1})
