"""Saliencies that only score, by hand."""

import pytest
import torch

from optimum_neuronal.saliency import SALIENCIES


WEIGHT = torch.tensor([[1.0, -2.0], [-3.0, 0.5]])
ACTIVATION = torch.tensor([2.0, 4.0])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("magnitude", [[1, 2], [3, 0.5]]),
        ("wanda", [[2, 8], [6, 2]]),
        # |W| a = [[2, 8], [6, 2]]: means over the rows 5 and 4, over the columns 4 and 5
        ("multiflow", [[1 * 5 * 4, 2 * 5 * 5], [3 * 4 * 4, 0.5 * 4 * 5]]),
        # shares of the rows: [1/3, 2/3], [6/7, 1/7]; of the columns: [1/4, 3/4], [4/5, 1/5]; times [2, 4] ** 0.5
        ("ria", [[(1 / 3 + 1 / 4) * 2**0.5, (2 / 3 + 4 / 5) * 2], [(6 / 7 + 3 / 4) * 2**0.5, (1 / 7 + 1 / 5) * 2]]),
    ],
)
def test_by_hand(name, expected):
    torch.testing.assert_close(SALIENCIES.get(name)().score(WEIGHT, ACTIVATION), torch.tensor(expected).float())


def test_ria_without_weights_is_finite_and_its_power_is_not_negative():
    assert torch.isfinite(SALIENCIES.get("ria")().score(torch.zeros(2, 2), ACTIVATION)).all()
    with pytest.raises(ValueError, match="power is -1"):
        SALIENCIES.make("ria", "saliency_args", {"power": -1})
