import pytest
import torch
from sweeps import state, unchanged

from optimum_neuronal import NeuronALConfig
from optimum_neuronal.engine.engine import Engine
from optimum_neuronal.pruning import finding
from optimum_neuronal.pruning.checking import check
from optimum_neuronal.pruning.finding import Shared, find_changes
from optimum_neuronal.runtime.clock import Clock


def find(model, ids, clock=None, shared=None, **fields):
    config = NeuronALConfig(
        0.5, **{"saliency": "wanda", "topup": "uniform", "num_samples": 12, "num_alignment_samples": 4, **fields}
    )
    methods = config.make_methods()
    decoder = check(model, config, methods)
    return find_changes(model, decoder, config, methods, ids, clock or Clock(), shared=shared)


def test_changes_are_found_and_none_is_made(llama, ids):
    before, clock = state(llama), Clock()
    outcome = find(llama, ids, clock)
    assert unchanged(llama, before) and list(clock.seconds) == ["allocation", "pruning"]
    assert set(outcome.allocation.plan.sparsity.values()) == {0.5} and outcome.starved_experts == []
    assert outcome.changes.keys() == outcome.allocation.plan.sparsity.keys()
    for name, change in outcome.changes.items():
        assert (change.applied(llama.get_parameter(f"{name}.weight")) == 0).float().mean() == 0.5
    assert outcome.block_forwards == 3 + 12 * 5, "the check; what blocks receive, and what all but the last put out"


@pytest.mark.parametrize("asked, tokens, size", [(None, 512, 4), (None, 1500, 1), (None, 4096, 1), (3, 512, 3)])
def test_a_batch_is_of_about_2048_tokens_unless_it_is_told(llama, asked, tokens, size, monkeypatch):
    sizes = []
    monkeypatch.setattr(finding, "with_less_memory", lambda find, batch_size: sizes.append(batch_size))
    find(llama, torch.zeros(1, tokens, dtype=torch.int64), batch_size=asked)
    assert sizes == [size]


def test_a_model_is_checked_once_for_all_that_share(llama, ids, monkeypatch):
    checks, shared = [], Shared()
    monkeypatch.setattr(Engine, "check_replay", lambda self: checks.append(1))
    find(llama, torch.empty(0, 0, dtype=torch.int64), shared=shared, saliency="magnitude")
    assert not checks and not shared.checked, "what looks at no activation replays nothing"
    for _ in range(2):
        find(llama, ids, shared=shared)
    assert checks == [1] and shared.checked
