"""Every kind of method, dtype and choice of projections with rotate=True."""

import pytest
import torch
from conftest import make_model
from turning import random_rotations, rotated_of, uneven

from optimum_neuronal.rotation import learning

from .test_rotate import prune


METHODS = {
    "magnitude": {"saliency": "magnitude"},
    "pattern": {"pattern": "2:4", "sparsity": 0.5},
    "alps and search": {"saliency": "alps", "topup": "search", "topup_args": {"budget": 8}, "refit_epochs": 0},
    "sparsegpt": {"saliency": "sparsegpt"},
    "neuronal": {"topup": "neuronal", "topup_args": {"block_lambdas": [0.05, 0.15], "row_lambdas": [0, 0.1]}},
    "owl": {"topup": "owl"},
    "besa": {"topup": "besa"},
    "dsnot": {"topup": "dsnot"},
}


@pytest.mark.parametrize("method", METHODS)
def test_every_kind_of_method_prunes_the_rotated_model(method, ids):
    model = make_model("llama")
    pruner = prune(model, ids, **METHODS[method])
    report = pruner.report
    assert report.rotation["objective"][1] < report.rotation["objective"][0] and report.rotation["stream"]
    assert report.achieved_sparsity == pytest.approx(METHODS[method].get("sparsity", 0.6), abs=2e-2)
    assert not torch.equal(model.model.embed_tokens.weight, make_model("llama").model.embed_tokens.weight)
    assert "rotation" in report.seconds


@pytest.mark.parametrize("dtype, allowed", [(torch.bfloat16, 0.2), (torch.float64, 1e-3)])
def test_other_dtypes(dtype, allowed, ids):
    model = make_model("llama").to(dtype)
    pruner = prune(model, ids)
    assert 0 < pruner.report.rotation["nats_changed"] < allowed and model.dtype == dtype


def test_random_rotations_pass_the_check(ids, monkeypatch):
    """What is learned is a small rotation: any other is as right."""
    model = uneven(make_model("granitemoe"))
    rotations = random_rotations(rotated_of(model))
    monkeypatch.setattr(learning.Rotation, "learn", lambda *_args: (rotations, [2.0, 1.0]))
    assert prune(model, ids).report.rotation["nats_changed"] < 1e-4
