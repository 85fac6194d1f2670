import pytest
import torch

from optimum_neuronal.pruning.rates import Rates, measure_matmul_rate, measure_rates


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_measured_rate(dtype):
    assert 1e6 < measure_matmul_rate(dtype, torch.device("cpu"), seconds=0.05) < 1e16


def test_all_that_a_prune_consists_of_is_measured():
    rates = measure_rates(torch.float32, torch.device("cpu"), 1000)
    assert isinstance(rates, Rates) and all(1e4 < rate < 1e16 for rate in vars(rates).values())
    assert rates.solved == rates.products
