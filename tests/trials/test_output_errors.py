import math

import pytest
import torch
from conftest import make_model
from forward import squared_norms
from trial_helpers import make_trials, state, uniform

import optimum_neuronal.trials.output_errors as module
from optimum_neuronal.blocks.block_inputs import inference
from optimum_neuronal.blocks.statistics import activation
from optimum_neuronal.saliency.plan import Plan, mask_rows
from optimum_neuronal.topup.neuronal import block_plan
from optimum_neuronal.trials.output_errors import kl, nll


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


def test_nll_by_hand():
    """The words are 1 after the first position, 0 after the second; the dense model plays no part."""
    assert nll(None)(SPARSE, FOLLOWING).item() == pytest.approx(-math.log(0.75) - math.log(0.25), rel=1e-6)


def test_output_errors_by_brute_force(any_model, ids):
    """Whole forwards of the model, sequence by sequence, with the masks that the dense model's activations give."""
    with inference(any_model):
        trials = make_trials(any_model, ids)
        plans = [block_plan(trials.decoder, 0.6, lam) for lam in (0.1, 0.2)]
        found = {metric: trials.output_errors(plans, metric, None) for metric in ("kl", "nll")}
        projections = trials.decoder.projections
        norms = squared_norms(any_model, ids[:4], projections)
        dense_logits = any_model(ids[:4]).logits.log_softmax(dim=-1)
        for number, plan in enumerate(plans):
            before = state(any_model)
            for name, projection in projections.items():
                score = trials.saliency.score(projection.weight, activation(norms[name]))
                projection.weight.masked_fill_(~mask_rows(score, plan.row_counts(name, projection.shape)), 0)
            logits = any_model(ids[:4]).logits.log_softmax(dim=-1)
            any_model.load_state_dict(before)
            kl = (dense_logits.exp() * (dense_logits - logits)).sum(dim=-1)[:, :-1].mean().item()
            nll = -logits[:, :-1].gather(2, ids[:4, 1:, None]).mean().item()
            assert found["kl"][number] == pytest.approx(kl, rel=2e-2)
            assert found["nll"][number] == pytest.approx(nll, rel=1e-3)


def test_plans_share_what_they_have_in_common(trials):
    base = uniform(trials).sparsity
    last = {**base, trials.decoder.blocks[-1].pruned_names[0]: 0.9}
    plans = [Plan(base), Plan(last), Plan(dict(base))]
    alone = [trials.output_errors([plan], "kl", None)[0] for plan in plans]
    trials.runner.block_forwards = 0
    assert trials.output_errors(plans, "kl", None) == alone
    assert trials.runner.block_forwards == 4 * (1 + 1 + 2), "they differ in the last of three blocks"


def test_pieces_of_sequences_add_up(llama, ids, monkeypatch):
    """Sequences of 16 tokens: one piece, and pieces of 4 with a shorter last one."""
    with inference(llama):
        trials = make_trials(llama, ids, batch_size=1)
        plans = [block_plan(trials.decoder, 0.6, lam) for lam in (0.1, 0.2)]
        whole = {metric: trials.output_errors(plans, metric, None) for metric in ("kl", "nll")}
        monkeypatch.setattr(module, "CACHED", 4 * llama.config.vocab_size)
        sizes, logits = [], trials.runner.logits
        monkeypatch.setattr(trials.runner, "logits", lambda ids, h: sizes.append(h.shape[1]) or logits(ids, h))
        for metric, expected in whole.items():
            assert trials.output_errors(plans, metric, None) == pytest.approx(expected, rel=1e-5)
    assert set(sizes) == {4, 3}


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
        plans = [Plan(uniform(trials, 0.0).sparsity | first), uniform(trials)]
        sparse_stream = trials.reconstruction_errors(plans, "sparse-stream", None)
        dense = trials.reconstruction_errors(plans, "dense", None)
        assert trials.reconstruction_errors(plans[1:], "sparse-stream", None) == sparse_stream[1:]
    assert sparse_stream[0] == pytest.approx(dense[0], rel=1e-5)
    assert abs(sparse_stream[1] - dense[1]) > 1e-3 * dense[1]
