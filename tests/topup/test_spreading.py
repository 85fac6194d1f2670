import pytest
import torch

from optimum_neuronal.topup import get_dist
from optimum_neuronal.topup.spreading import shift_to_mean


class TestGetDist:
    def test_equation_by_hand(self):
        assert get_dist(0.7, 0.1, torch.tensor([3.0, 2.0, 1.0])).tolist() == pytest.approx([0.6, 0.7, 0.8])
        assert get_dist(0.5, 0.2, torch.tensor([0.0, 0.0, 3.0])).tolist() == pytest.approx(
            [0.5 + 0.4 / 3] * 2 + [0.5 - 0.8 / 3]
        )

    def test_constant_values_and_lambda_zero_give_the_mean(self):
        assert get_dist(0.7, 0.2, torch.ones(4)).tolist() == [0.7] * 4
        assert get_dist(0.7, 0.0, torch.arange(4)).tolist() == [0.7] * 4
        assert get_dist(0.7, 0.2, torch.tensor([5.0])).tolist() == [0.7]

    @pytest.mark.parametrize("sparsity", [0.02, 0.1, 0.5, 0.9, 0.98])
    @pytest.mark.parametrize("lam", [0.05, 0.25, 1.0])
    def test_clipping_keeps_the_mean(self, sparsity, lam):
        values = torch.randn(50, generator=torch.Generator().manual_seed(0))
        spread = get_dist(sparsity, lam, values)
        assert spread.mean().item() == pytest.approx(sparsity, abs=1e-9)
        assert spread.min() >= 0.01 and spread.max() <= 0.99
        assert torch.equal(spread.argsort(stable=True), (-spread.neg()).argsort(stable=True))

    def test_sparsities_beyond_the_clip_stay_as_asked(self):
        assert get_dist(0.0, 0.2, torch.arange(3)).tolist() == [0.0] * 3
        assert get_dist(0.995, 0.2, torch.arange(3)).tolist() == [0.995] * 3

    def test_the_mean_is_weighted_by_size(self):
        weights = torch.tensor([1.0, 3.0])
        spread = get_dist(0.6, 0.1, torch.tensor([1.0, 0.0]), weights)
        assert spread.tolist() == pytest.approx([0.45, 0.65])


def test_shift_to_mean_by_hand():
    values, weights = torch.tensor([0.5, 0.7], dtype=torch.float64), torch.tensor([1, 3])  # mean 0.65
    assert shift_to_mean(values, 0.6, weights, 0, 1).tolist() == pytest.approx([0.45, 0.65])
    # 0.9 + x and 1 (clipped): 0.25 (0.9 + x) + 0.75 = 0.98, so x = 0.02
    values = torch.tensor([0.9, 0.99], dtype=torch.float64)
    assert shift_to_mean(values, 0.98, weights, 0, 1).tolist() == pytest.approx([0.92, 1.0])
