import math

import pytest
import torch
from by_hand import by_block
from trial_helpers import make_evaluator

from optimum_neuronal.common.torch_state import inference
from optimum_neuronal.topup.alpha_pruning import (
    AlphaPruning,
    AuthorsAlphaPruning,
    block_alphas,
    fitted_exponent,
    hill_exponent,
    scale_factors,
    scaled_sparsities,
)


def test_hill_estimator_by_hand():
    """The tail begins at 1, which two of the six share; e and e^3 lie 1 and 3 above: 1 + 3 / (0 + 1 + 3)."""
    spectrum = torch.tensor([math.e**3, 1.0, math.e**-2, 1.0, math.e**-5, math.e])
    assert hill_exponent(spectrum, bins=8) == pytest.approx(1 + 3 / 4)


def test_scale_does_not_matter_and_zeros_do_not_count():
    spectrum = torch.rand(200, generator=torch.Generator().manual_seed(0)).square()
    exponent = hill_exponent(spectrum)
    assert hill_exponent(1e-6 * spectrum) == pytest.approx(exponent, rel=1e-4)
    assert hill_exponent(torch.cat([torch.zeros(500), spectrum, torch.full((500,), 1e-13)])) == exponent


def test_the_authors_tail_may_begin_far_below_the_peak():
    """Tails from e^-3, e^-2 and the peak at 1 are 0.32, 0.44 and 0.5 away from their power laws, the first's exponent is
    1 + 4 / (0 + 1 + 3 + 3)."""
    spectrum = torch.tensor([1.0, math.e**-3, 1.0, math.e**-2])
    assert fitted_exponent(spectrum) == pytest.approx(1 + 4 / 7) and hill_exponent(spectrum) is None
    assert fitted_exponent(torch.tensor([0.0, 2.0])) is None and fitted_exponent(torch.zeros(2)) is None


def test_a_spectrum_without_tail_says_nothing_and_is_left_out_of_the_mean():
    for spectrum in ([0.0] * 4, [1.0] * 4, [2.0]):
        assert hill_exponent(torch.tensor(spectrum)) is None
    assert block_alphas([[2.0, None, 4.0], [None], [5.0]]) == [3.0, 4.0, 5.0]
    assert block_alphas([[None], [None, None]]) == [1.0, 1.0]


def test_factors_are_linear_and_what_would_exceed_the_most_goes_to_the_others():
    """Factors 0.7, 1.0, 1.3 at 90 %: 1.17 becomes 0.99, and the others, still as 0.7 to 1.0, make up for the 0.18."""
    assert scale_factors(torch.tensor([3.0, 2.0, 2.5, 4.0]), 0.3).tolist() == pytest.approx([1.0, 0.7, 0.85, 1.3])
    assert scale_factors(torch.tensor([2.0, 2.0]), 0.3).tolist() == [1.0, 1.0]
    pair = torch.tensor([0.7, 1.3], dtype=torch.float64)  # their weighted mean is 1.15
    assert scaled_sparsities(0.46, pair, torch.tensor([1.0, 3.0])).tolist() == pytest.approx([0.28, 0.52])
    factors = torch.tensor([0.7, 1.0, 1.3], dtype=torch.float64)
    for sparsity, expected in [
        (0.9, [0.72, 0.99, 0.99]),  # 1.0 is cut off as well
        (0.8, [0.7 * 1.41 / 1.7, 1.41 / 1.7, 0.99]),
        (0.995, [0.995] * 3),
    ]:
        assert scaled_sparsities(sparsity, factors, torch.ones(3)).tolist() == pytest.approx(expected)


def test_a_model_by_its_spectra(llama, ids):
    """The first block's weights get a flat spectrum, the last one's a heavy tail: the first is pruned most."""
    with inference(llama):
        evaluator = make_evaluator(llama, ids[:0], "magnitude")
        for block, power in zip(evaluator.decoder.blocks, (0.2, 1.0, 2.0)):
            for projection in block.pruned:
                u, _, v = torch.linalg.svd(projection.weight, full_matrices=False)
                steps = torch.arange(1, min(projection.shape) + 1)
                projection.weight.copy_(u @ torch.diag(steps**-power) @ v)
        allocation = AlphaPruning(bins=4).allocate(evaluator, 0.6)
    alphas = allocation.decisions["alpha_pruning"]["alphas"]
    assert alphas == sorted(alphas, reverse=True)
    first, _, last = by_block(evaluator.decoder.blocks, allocation.plan)
    assert first / last == pytest.approx(1.3 / 0.7) and evaluator.runner.block_forwards == 0
    with inference(llama):  # the authors' code: what exceeds 1 is lost, and so are fractions of a weight
        theirs = AuthorsAlphaPruning().allocate(evaluator, 0.9).plan
    shares, columns = by_block(evaluator.decoder.blocks, theirs), evaluator.decoder.blocks[0].pruned[0].shape[1]
    assert max(shares) == 1 and sum(shares) / 3 < 0.88 and all((columns * share).is_integer() for share in shares)
