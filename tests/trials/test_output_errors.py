import math

import pytest
import torch
from conftest import make_model
from forward import inputs_of
from trial_helpers import dense_masks, make_evaluator, state, uniform

import optimum_neuronal.trials.output_errors as module
from optimum_neuronal.common.torch_state import inference
from optimum_neuronal.model.change import Zeros
from optimum_neuronal.model.projections import trial_weights
from optimum_neuronal.saliency.plan import Plan
from optimum_neuronal.topup.neuronal import NeuronAL
from optimum_neuronal.trials.alignment import ReconstructionErrors
from optimum_neuronal.trials.output_errors import OutputErrors, divergence


FOLLOWING = torch.tensor([1, 0])  # the words after each of two positions
DENSE = torch.tensor([[0.5, 0.5], [0.25, 0.75]]).log()
SPARSE = torch.tensor([[0.25, 0.75], [0.25, 0.75]]).log()


def test_the_divergence_by_hand():
    """The logits of the second position are equal."""
    expected = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert divergence(DENSE)(SPARSE, FOLLOWING).item() == pytest.approx(expected, rel=1e-6)
    assert divergence(DENSE)(DENSE, FOLLOWING).item() == pytest.approx(0, abs=1e-7)


def test_output_errors_by_brute_force(any_model, ids):
    """Whole forwards of the model, with the masks that the dense model's activations give."""
    with inference(any_model):
        evaluator = make_evaluator(any_model, ids)
        plans = [NeuronAL().block_plan(evaluator.decoder, 0.6, lam) for lam in (0.1, 0.2)]
        found = {metric: evaluator.measure(OutputErrors(metric), plans) for metric in ("kl", "nll")}
        dense = any_model(ids[:4]).logits.log_softmax(dim=-1)
        for number, plan in enumerate(plans):
            masks = dense_masks(any_model, ids[:4], evaluator, plan)
            with trial_weights(list(evaluator.decoder.projections.values()), lambda p, own=masks: Zeros(own[p.name])):
                sparse = any_model(ids[:4]).logits.log_softmax(dim=-1)
            kl = (dense.exp() * (dense - sparse)).sum(dim=-1)[:, :-1].mean().item()
            nll = -sparse[:, :-1].gather(2, ids[:4, 1:, None]).mean().item()
            assert found["kl"][number] == pytest.approx(kl, rel=2e-2)
            assert found["nll"][number] == pytest.approx(nll, rel=1e-3)


def test_plans_share_what_they_have_in_common(evaluator):
    base = uniform(evaluator).sparsity
    last = {**base, evaluator.decoder.blocks[-1].pruned_names[0]: 0.9}
    plans = [Plan(base), Plan(last), Plan(dict(base))]
    alone = [evaluator.measure(OutputErrors("kl"), [plan])[0] for plan in plans]
    evaluator.runner.block_forwards = 0
    assert evaluator.measure(OutputErrors("kl"), plans) == alone
    assert evaluator.runner.block_forwards == 4 * (1 + 1 + 2), "they differ in the last of three blocks"


def test_pieces_of_sequences_add_up(llama, ids, monkeypatch):
    """Sequences of 16 tokens: one piece, and pieces of 4 with a shorter last one."""
    with inference(llama):
        evaluator = make_evaluator(llama, ids, batch_size=1)
        plans = [NeuronAL().block_plan(evaluator.decoder, 0.6, lam) for lam in (0.1, 0.2)]
        whole = {metric: evaluator.measure(OutputErrors(metric), plans) for metric in ("kl", "nll")}
        monkeypatch.setattr(module, "CPU_LOGITS", 4 * llama.config.vocab_size)
        sizes, logits = [], evaluator.runner.logits
        monkeypatch.setattr(evaluator.runner, "logits", lambda ids, h: sizes.append(h.shape[1]) or logits(ids, h))
        for metric, expected in whole.items():
            assert evaluator.measure(OutputErrors(metric), plans) == pytest.approx(expected, rel=1e-5)
    assert set(sizes) == {4, 3}


def test_outputs_may_be_compared_on_another_plans_stream_and_on_fewer_sequences(llama, ids):
    """A plan on its own stream has the error of the model that it prunes one block after the other."""
    with inference(llama):
        evaluator, before = make_evaluator(llama, ids), state(llama)
        plan, dense = uniform(evaluator, 0.6), llama(ids[:4]).logits.log_softmax(dim=-1)
        (own,) = evaluator.measure(OutputErrors("kl", stream_of=plan), [plan])
        (fewer,) = evaluator.measure(OutputErrors("kl", stream_of=plan, sequences=2), [plan])
        for block in evaluator.decoder.blocks:
            masks = dense_masks(llama, ids[:4], evaluator, plan, {p.name: p for p in block.pruned})
            for projection in block.pruned:
                projection.weight.masked_fill_(~masks[projection.name], 0)
        sparse = llama(ids[:4]).logits.log_softmax(dim=-1)
        llama.load_state_dict(before)
    kl = (dense.exp() * (dense - sparse)).sum(dim=-1)[:, :-1]
    assert own == pytest.approx(kl.mean().item(), rel=1e-2)
    assert fewer == pytest.approx(kl[:2].mean().item(), rel=1e-2)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_reconstruction_error(family, ids):
    """By brute force: outputs of every projection on the dense model's inputs, with its own weights and with sparse ones.

    On the sparse stream the first block reads the dense model's, later ones what the sparse blocks before them put out.
    """
    model = make_model(family)
    with inference(model):
        evaluator = make_evaluator(model, ids)
        projections, half = evaluator.decoder.projections, uniform(evaluator)
        first = dict.fromkeys(evaluator.decoder.blocks[0].pruned_names, 0.5)
        plans = [Plan(uniform(evaluator, 0.0).sparsity | first), half]
        plans += [NeuronAL().block_plan(evaluator.decoder, 0.6, lam) for lam in (0.0, 0.2)]
        own, dense = (evaluator.measure(ReconstructionErrors(name), plans) for name in ("sparse-stream", "dense"))
        assert evaluator.measure(ReconstructionErrors("sparse-stream"), [half]) == own[1:2]
        inputs = inputs_of(model, ids[:4], projections) if family != "mixtral" else None
        for error, plan in zip(dense, plans if inputs else []):
            masks = dense_masks(model, ids[:4], evaluator, plan)
            lost = (inputs[name] @ p.weight.masked_fill(masks[name], 0).T for name, p in projections.items())
            assert error == pytest.approx(sum(part.double().square().sum().item() for part in lost), rel=1e-4)
    assert own[0] == pytest.approx(dense[0], rel=1e-5) and abs(own[1] - dense[1]) > 1e-3 * dense[1]
