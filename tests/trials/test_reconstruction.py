import pytest
from conftest import make_model
from forward import squared_norms
from trial_helpers import make_trials, uniform

from optimum_neuronal.blocks.block_inputs import inference
from optimum_neuronal.saliency.masks import mask_rows
from optimum_neuronal.saliency.plan import SparsityPlan
from optimum_neuronal.topup.neuronal import block_plan


def brute_reconstruction_error(model, ids, plan, projections):
    """Outputs of every projection on the dense model's inputs, with its own weights and with its sparse ones."""
    norms, inputs = squared_norms(model, ids, projections), {}
    handles = [
        p.module.register_forward_pre_hook(lambda _module, args, name=name: inputs.__setitem__(name, args[0]))
        for name, p in projections.items()
    ]
    model(ids)
    for handle in handles:
        handle.remove()
    total = 0.0
    for name, projection in projections.items():
        score = projection.weight.abs() * norms[name].mean(dim=0).sqrt()
        mask = mask_rows(score, plan.row_counts(name, projection.shape))
        difference = inputs[name] @ projection.weight.T - inputs[name] @ projection.weight.masked_fill(~mask, 0).T
        total += difference.double().square().sum().item()
    return total


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_reconstruction_error_by_brute_force(family, ids):
    model = make_model(family)
    with inference(model):
        trials = make_trials(model, ids)
        plans = [block_plan(trials.decoder, 0.6, lam) for lam in (0.0, 0.2)]
        errors = trials.reconstruction_errors(plans, "dense", None)
        expected = [brute_reconstruction_error(model, ids[:4], plan, trials.decoder.projections) for plan in plans]
    assert errors == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_reconstruction_error_on_the_sparse_stream(family, ids):
    """In the first block it is the dense model's; beyond, what comes of the sparse blocks is read."""
    model = make_model(family)
    with inference(model):
        trials = make_trials(model, ids)
        first = dict.fromkeys(trials.decoder.blocks[0].pruned_names, 0.5)
        plans = [SparsityPlan(uniform(trials, 0.0).sparsity | first), uniform(trials)]
        sparse_stream = trials.reconstruction_errors(plans, "sparse-stream", None)
        dense = trials.reconstruction_errors(plans, "dense", None)
        assert trials.reconstruction_errors(plans[1:], "sparse-stream", None) == sparse_stream[1:]
    assert sparse_stream[0] == pytest.approx(dense[0], rel=1e-5)
    assert abs(sparse_stream[1] - dense[1]) > 1e-3 * dense[1]
