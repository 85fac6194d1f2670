import pytest
import torch
from random_layers import weights

from optimum_neuronal.saliency import SALIENCIES
from optimum_neuronal.saliency.base import solve_dampened


@pytest.mark.parametrize("name", SALIENCIES.names())
def test_contract(name):
    saliency = SALIENCIES.get(name)()
    weight, activation = weights(5, 7), weights(1, 7)[0].abs() if saliency.uses_activations else None
    copy = weight.clone()
    score = saliency.score(weight, activation)
    assert score.shape == weight.shape and score.dtype == torch.float32
    assert torch.isfinite(score).all() and (score >= 0).all()
    assert torch.equal(weight, copy) and torch.equal(score, saliency.score(weight, activation))
    assert torch.equal(saliency.score(-weight, activation), score), "the sign of a weight does not matter"


class TestSolveDampened:
    def test_a_share_of_the_mean_diagonal_is_added(self):
        hessian = torch.tensor([[2.0, 1.0], [1.0, 4.0]])
        dampened = solve_dampened(hessian, 0.1, "fc1", torch.clone)
        torch.testing.assert_close(dampened, torch.tensor([[2.3, 1.0], [1.0, 4.3]]))
        assert hessian.tolist() == [[2.0, 1.0], [1.0, 4.0]], "not changed"

    def test_dead_inputs_count_as_one(self):
        for diagonal, expected in (([2.0, 0.0, 4.0], [3.0, 2.0, 5.0]), ([0.0, 0.0], [1.5, 1.5])):
            dampened = solve_dampened(torch.diag(torch.tensor(diagonal)), 0.5, "fc1", torch.clone)
            assert dampened.diagonal().tolist() == expected

    def test_dampening_is_raised_tenfold_until_an_attempt_succeeds_or_it_gives_up(self, said):
        diagonals = []

        def attempt(matrix):
            diagonals.append(matrix[0, 0].item())
            return "found" if len(diagonals) == 3 else None

        assert solve_dampened(2 * torch.eye(2), 0.01, "fc1", attempt) == "found"
        assert diagonals == pytest.approx([2.02, 2.2, 4])
        assert said[1] == "The Hessian of fc1 is close to singular: dampening is raised from 0.1 to 1."
        with pytest.raises(ValueError, match="Hessian of fc1 cannot be inverted, even with dampening 1000.*num_samp"):
            solve_dampened(2 * torch.eye(2), 0.01, "fc1", lambda matrix: None)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_is_an_error(bad):
    matrix = torch.eye(4)
    matrix[1, 1] = bad
    with pytest.raises(ValueError, match="The Hessian of model.fc1 is not finite: load the model in"):
        solve_dampened(matrix, 0.01, "model.fc1", torch.clone)
