"""Targets from the dense model: against a solution by hand, and what they are good for on a trained model."""

import copy
from functools import lru_cache

import authors
import pytest
import torch
from conftest import make_model, memory_of
from trial_helpers import build_trials, state, unchanged, uniform

from optimum_neuronal import NeuronALConfig, NeuronALPruner
from optimum_neuronal.blocks.block_inputs import inference
from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.pruning.final_pass import FinalPruning
from optimum_neuronal.saliency import SALIENCIES
from optimum_neuronal.saliency.alps import ALPS
from optimum_neuronal.saliency.base import dense_target


FAST = {"saliency": "alps", "saliency_args": {"iterations": 9}}
METHODS = {"alps": FAST, "sparsegpt": {"saliency": "sparsegpt"}}


def prune(model, ids, work_dir=None, **fields):
    memory = memory_of(fields)
    fields = {"topup": "uniform", "reconstruct": "dense", "num_alignment_samples": 4, **fields}
    pruner = NeuronALPruner(NeuronALConfig(0.6, num_samples=len(ids), **fields))
    pruner.prune(model, ids, work_dir, **memory)
    return pruner


def received(model, ids, module_name) -> torch.Tensor:
    """What a module receives in a whole forward: (tokens, in)."""
    seen = []
    module = model.get_submodule(module_name)
    handle = module.register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    with torch.no_grad():
        model(ids)
    handle.remove()
    return seen[0].reshape(-1, seen[0].shape[-1])


@pytest.mark.parametrize("saliency", METHODS)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_every_projection_in_its_turn_by_hand(family, saliency, ids):
    """A dense and a sparse model side by side: whole forwards, one projection after the other."""
    model, dense, sparse = make_model(family), make_model(family), make_model(family)
    method = ALPS(iterations=9) if saliency == "alps" else SALIENCIES.get(saliency)()
    before = state(model)
    with inference(model):
        trials = build_trials(find_decoder(model), method, ids, 4, 5)
        found = FinalPruning(trials, uniform(trials, 0.6), toward_dense=True).find()[0]
    assert unchanged(model, before)
    decoder = find_decoder(sparse)
    for name in decoder.projections:
        projection = decoder.projections[name]
        x, x_dense = received(sparse, ids, name), received(dense, ids, name)
        target = dense_target(projection.weight.float(), x.T @ x, x_dense.T @ x, method.dampening, name)
        expected = method.prune(target, x.T @ x, 0.6)
        own = found[name].unpack()
        different = ((expected == 0) != (own == 0)).sum().item()
        assert different <= 0.03 * own.numel() + 2, "equal but for rounding, and for solving q, k and v together"
        found[name].apply_to(projection.weight)
        errors = [torch.linalg.norm(x_dense @ before_of(dense, name).T - x @ w.T) for w in (own, expected)]
        assert errors[0] <= 1.1 * errors[1]


def before_of(model, name):
    return find_decoder(model).projections[name].weight


@lru_cache
def trained():
    """The first three blocks of the reference model, and sequences to calibrate and to test on."""
    model = authors.load_model()
    model.model.layers = model.model.layers[:3]
    model.config.num_hidden_layers = 3
    return model, authors.load_ids("calibration_ids")[:16], authors.load_ids("test_ids_python")[:8]


def divergence(model, dense, ids) -> float:
    """KL divergence of a model's next-token distributions from the dense one's, in nats per token."""
    with torch.no_grad():
        ours, theirs = (m(ids).logits.log_softmax(dim=-1) for m in (model, dense))
    return (theirs.exp() * (theirs - ours)).sum(dim=-1).mean().item()


@pytest.mark.parametrize("saliency", METHODS)
def test_outputs_come_nearer_to_the_dense_models(saliency):
    dense, ids, test_ids = trained()
    found = {}
    for reconstruct in ("block", "dense"):
        model = copy.deepcopy(dense)
        fields = {"topup": "uniform", "num_samples": len(ids), "reconstruct": reconstruct, **METHODS[saliency]}
        NeuronALPruner(NeuronALConfig(0.7, **fields)).prune(model, ids)
        found[reconstruct] = divergence(model, dense, test_ids)
    assert found["dense"] < 0.95 * found["block"]


def test_the_default_of_alps_is_dense_and_of_sparsegpt_block(ids):
    for saliency, expected, other in (("alps", "dense", "block"), ("sparsegpt", "block", "dense")):
        models = [make_model("llama", num_hidden_layers=2) for _ in range(3)]
        for model, reconstruct in zip(models, (None, expected, other)):
            prune(model, ids, reconstruct=reconstruct, **METHODS[saliency])
        assert unchanged(models[1], state(models[0])) and not unchanged(models[2], state(models[0]))


def test_experts_that_receive_nothing_at_all(ids):
    """One sequence at a time, so that in the run which tells the stages some have no token either."""
    model = make_model("mixtral", num_experts_per_tok=1)
    for layer in model.model.layers:
        layer.mlp.gate.weight.data[1] = -layer.mlp.gate.weight.data[0]
        layer.mlp.gate.weight.data[2:] = 0
    pruner = prune(model, ids, min_expert_tokens=1, batch_size=1, **FAST)
    assert pruner.report.achieved_sparsity == pytest.approx(0.6, abs=2e-3)
    assert {name.split(".experts.")[1][0] for name in pruner.report.starved_experts} == {"2", "3"}
