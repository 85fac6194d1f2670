import math

import pytest
import torch

from optimum_neuronal.engine.statistics import SquaredNorms
from optimum_neuronal.model.projections import Projection
from optimum_neuronal.trials.alignment import METRICS, alignment_error, total_error


def test_equation_3_by_hand():
    dense = torch.tensor([[1.0, 9.0], [4.0, 4.0]])  # activations 1 3 and 2 2
    sparse = torch.tensor([[1.0, 1.0], [4.0, 4.0]])  # activations 1 1 and 2 2
    # first sequence: (1/4, 3/4) - (1/2, 1/2) has norm sqrt(2)/4; the second is aligned; both are divided by in = 2
    assert alignment_error(dense, sparse).item() == pytest.approx(2**0.5 / 4 / 2)


def test_pooled_takes_one_activation_over_all_sequences():
    dense = torch.tensor([[1.0, 0.0], [1.0, 2.0]])  # mean 1 1
    sparse = torch.tensor([[4.0, 4.0], [4.0, 4.0]])
    assert alignment_error(dense, sparse, "pooled").item() == pytest.approx(0, abs=1e-8)
    assert alignment_error(dense, sparse, "sequence").item() > 0.1


def test_cosine_by_hand():
    dense, sparse = torch.tensor([[9.0, 16.0]]), torch.tensor([[16.0, 9.0]])  # activations 3 4 and 4 3
    assert alignment_error(dense, sparse, metric="cosine").item() == pytest.approx((1 - 24 / 25) / 2)
    assert alignment_error(dense[:, :1], sparse[:, :1], metric="cosine").item() == 0  # one feature has no direction


def test_kl_by_hand():
    dense, sparse = torch.tensor([[1.0, 9.0]]), torch.tensor([[1.0, 1.0]])  # shares 1/4 3/4 and 1/2 1/2
    expected = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)
    assert alignment_error(dense, sparse, metric="kl").item() == pytest.approx(expected / 2)


def test_kl_of_a_silenced_feature_is_large_and_finite():
    dense = torch.tensor([[1.0, 1.0]])
    silenced = alignment_error(dense, torch.tensor([[0.0, 1.0]]), metric="kl").item()
    assert 1 < silenced < 20 and silenced > alignment_error(dense, torch.tensor([[0.01, 1.0]]), metric="kl").item()


@pytest.mark.parametrize("metric", METRICS)
def test_scale_does_not_matter(metric):
    norms = torch.rand(3, 5, generator=torch.Generator().manual_seed(0))
    assert alignment_error(norms, 49 * norms, metric=metric).item() == pytest.approx(0, abs=1e-8)


@pytest.mark.parametrize("metric", METRICS)
def test_no_error_is_negative(metric):
    """Candidates are abandoned by what they have added up so far, so nothing may be taken off again."""
    generator = torch.Generator().manual_seed(0)
    for size in (1e-7, 1e-3, 1):
        dense = torch.rand(50, 40, generator=generator)
        assert alignment_error(dense, dense + size * torch.rand(50, 40, generator=generator), metric=metric) >= 0


@pytest.mark.parametrize("metric", METRICS)
def test_dead_inputs_are_finite(metric):
    assert alignment_error(torch.zeros(2, 4), torch.zeros(2, 4), metric=metric).item() == 0
    assert torch.isfinite(alignment_error(torch.zeros(2, 4), torch.ones(2, 4), metric=metric))
    assert torch.isfinite(alignment_error(torch.ones(2, 4), torch.zeros(2, 4), metric=metric))


def test_total_counts_every_projection():
    norms = {}
    for model, value in (("dense", 1.0), ("sparse", 4.0)):
        shared, own = SquaredNorms(), SquaredNorms()
        shared.update(torch.tensor([[[1.0, value]]]), 1)
        own.update(torch.tensor([[[value, 1.0]]]), 1)
        norms[model] = {"q": shared, "k": shared, "o": own}
    single = alignment_error(norms["dense"]["q"].value, norms["sparse"]["q"].value)
    projections = [Projection(name, None, torch.nn.Linear(2, 2), True) for name in ("q", "k", "o")]
    total = total_error(projections, norms["dense"], norms["sparse"], "sequence", "l2")
    assert total.item() == pytest.approx(3 * single.item())


def test_experts_count_by_their_share_of_the_tokens():
    mixture = torch.nn.Module()
    projections = [Projection(f"experts.{e}.up", "up", mixture, True, "up", e) for e in range(3)]
    dense, sparse = ({p.name: SquaredNorms() for p in projections} for _ in range(2))
    for tokens, projection in zip((1, 3, 0), projections):
        rows = torch.arange(tokens)
        dense[projection.name].update_routed(torch.ones(tokens, 2), rows, 4)
        sparse[projection.name].update_routed(torch.tensor([[1.0, 3.0]]).expand(tokens, 2), rows, 4)
    single = alignment_error(torch.tensor([[1.0, 1.0]]), torch.tensor([[1.0, 9.0]]))
    assert total_error(projections, dense, sparse, "sequence", "l2").item() == pytest.approx(single.item())
    alone = total_error(projections[:1], dense, sparse, "sequence", "l2")
    both = total_error(projections[:2], dense, sparse, "pooled", "l2")
    assert alone.item() == pytest.approx(both.item()) == pytest.approx(single.item())
