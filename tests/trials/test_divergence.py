import math

import pytest
import torch

from optimum_neuronal.trials.divergence import OUTPUT_METRICS, kl, nll


def logits(*shares):
    """Logits by position and word, from probabilities."""
    return torch.tensor(shares).log()


FOLLOWING = torch.tensor([1, 0])
DENSE = logits([0.5, 0.5], [0.25, 0.75])
SPARSE = logits([0.25, 0.75], [0.25, 0.75])


def test_kl_by_hand():
    """Only the first position differs."""
    expected = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert kl(DENSE)(SPARSE, FOLLOWING).item() == pytest.approx(expected, rel=1e-6)
    assert kl(DENSE)(DENSE, FOLLOWING).item() == pytest.approx(0, abs=1e-7)


def test_kl_as_torch_computes_it_in_float64():
    torch.manual_seed(0)
    dense = 5 * torch.randn(16, 3000)
    sparse = dense + 0.01 * torch.randn_like(dense)  # 3e-5 nats a position: rounding is seen
    own, other = (values.double().log_softmax(dim=-1) for values in (sparse, dense))
    expected = torch.nn.functional.kl_div(own, other, reduction="sum", log_target=True).item()
    assert kl(dense)(sparse, None).item() == pytest.approx(expected, rel=5e-3)


def test_nll_by_hand():
    """The words are 1 after the first position, 0 after the second; the dense model plays no part."""
    assert nll(None)(SPARSE, FOLLOWING).item() == pytest.approx(-math.log(0.75) - math.log(0.25), rel=1e-6)


@pytest.mark.parametrize("metric", OUTPUT_METRICS)
def test_positions_are_summed_and_a_shift_of_all_logits_is_none(metric):
    measure = OUTPUT_METRICS[metric]
    one = measure(DENSE)(SPARSE, FOLLOWING).item()
    two = measure(DENSE.repeat(2, 1))(SPARSE.repeat(2, 1), FOLLOWING.repeat(2)).item()
    assert two == pytest.approx(2 * one, rel=1e-6)
    assert measure(DENSE + 3)(SPARSE - 7, FOLLOWING).item() == pytest.approx(one, rel=1e-5)
