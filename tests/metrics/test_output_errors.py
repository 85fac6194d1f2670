import math

import pytest
import torch

from optimum_neuronal.metrics.output_errors import OUTPUT_METRICS, kl, nll


def logits(*shares):
    """Logits of one sequence, by token and word, from probabilities."""
    return torch.tensor([shares]).log()


IDS = torch.tensor([[0, 1, 0]])
DENSE = logits([0.5, 0.5], [0.25, 0.75], [0.5, 0.5])
SPARSE = logits([0.25, 0.75], [0.25, 0.75], [0.9, 0.1])


def test_kl_by_hand():
    """Only the first position differs; the last one predicts nothing."""
    expected = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert kl(DENSE, SPARSE, IDS).item() == pytest.approx(expected, rel=1e-6)
    assert kl(DENSE, DENSE, IDS).item() == pytest.approx(0, abs=1e-7)


def test_nll_by_hand():
    """The words are 1 after the first token, 0 after the second; the dense model plays no part."""
    assert nll(DENSE, SPARSE, IDS).item() == pytest.approx(-math.log(0.75) - math.log(0.25), rel=1e-6)
    assert nll(SPARSE, SPARSE, IDS).item() == nll(DENSE, SPARSE, IDS).item()


@pytest.mark.parametrize("metric", OUTPUT_METRICS)
def test_sequences_are_summed_and_a_shift_of_all_logits_is_none(metric):
    measure = OUTPUT_METRICS[metric]
    one = measure(DENSE, SPARSE, IDS).item()
    two = measure(DENSE.repeat(2, 1, 1), SPARSE.repeat(2, 1, 1), IDS.repeat(2, 1)).item()
    assert two == pytest.approx(2 * one, rel=1e-6)
    assert measure(DENSE + 3, SPARSE - 7, IDS).item() == pytest.approx(one, rel=1e-5)
