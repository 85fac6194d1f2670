"""Pruning with rotate=True: the model as it was if anything fails, and an ordinary sparse model if nothing does."""

import json
from dataclasses import replace

import pytest
import torch
from conftest import make_model
from profiles import by_day
from safetensors import safe_open
from transformers import AutoModelForCausalLM
from trial_helpers import state, unchanged
from turning import logits, ties, uneven

from optimum_neuronal import NeuronALConfig, NeuronALPruner, inspect_checkpoint
from optimum_neuronal.data.calibration import CalibrationSet
from optimum_neuronal.files.records import Records
from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.pruning import prune as prune_module
from optimum_neuronal.pruning import rotate as module
from optimum_neuronal.pruning.context import check
from optimum_neuronal.pruning.rotate import rotated
from optimum_neuronal.rotation import learning, merging
from optimum_neuronal.rotation.merging import Originals, Rotations
from optimum_neuronal.rotation.rotated_weights import find_rotated


FIELDS = {"saliency": "wanda", "topup": "uniform", "num_samples": 12, "num_alignment_samples": 4, "rotate": True}
QUICK = {"steps": 6, "learning_rate": 0.05, "fisher_samples": 4}


def config(**fields):
    return NeuronALConfig(**{"sparsity": 0.6, "rotate_args": QUICK, **FIELDS, **fields})


def prune(model, ids, work_dir=None, batch_size=None, **fields):
    pruner = NeuronALPruner(config(**fields))
    pruner.prune(model, ids, work_dir, batch_size=batch_size)
    return pruner


def equal(first, second):
    return first.keys() == second.keys() and all(torch.equal(value, second[key]) for key, value in first.items())


def fail_at(monkeypatch, owner, name, number, error):
    """Has a function raise at a call; later ones are left alone."""
    calls, original = [], getattr(owner, name)

    def failing(*args, **kwargs):
        calls.append(name)
        if len(calls) == number:
            raise error
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, failing)
    return calls


STAGES = {
    "untying": (merging.hf_private, "refresh_tied_weights", 1),
    "folding": (merging, "widened", 3),
    "replay": (module.BlockRunner, "check_replay", 1),
    "gradients": (learning, "fisher_weights", 1),
    "inputs": (learning, "find_terms", 2),
    "learning": (learning, "block_loss", 5),
    "merging": (merging, "widened", 45),
    "checking": (module, "_token_losses", 2),
    "pruning": (prune_module.FinalPruning, "prune_block", 2),
    "report": (prune_module, "make_report", 1),
    "record": (prune_module, "make_sparsity_config", 1),
    "changes": (prune_module, "apply_changes", 1),
}


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("stop")], ids=["interrupted", "failed"])
@pytest.mark.parametrize("stage", STAGES)
def test_wherever_it_fails_the_model_is_as_it_was(stage, error, ids, monkeypatch):
    """Weights, config, ties, train mode, gradients and hooks."""
    model = make_model("gemma").train()
    model.model.layers[1].eval().requires_grad_(False)
    before, tied, config = state(model), ties(model), model.config
    needed = [parameter.requires_grad for parameter in model.parameters()]
    modes = [part.training for part in model.modules()]
    calls, pruner = (
        fail_at(monkeypatch, *STAGES[stage], error),
        NeuronALPruner(NeuronALConfig(0.6, rotate_args=QUICK, **FIELDS)),
    )
    with pytest.raises(type(error)):
        pruner.prune(model, ids)
    assert calls and unchanged(model, before) and equal(before, state(model))
    assert ties(model) == tied and model.config is config and not hasattr(config, "sparsity_config")
    assert [parameter.requires_grad for parameter in model.parameters()] == needed
    assert all(parameter.grad is None for parameter in model.parameters())
    assert [part.training for part in model.modules()] == modes and pruner.report is None
    assert torch.is_grad_enabled()


def context_of(model, ids, **fields):
    return replace(check(model, config(**fields)), calibration=CalibrationSet(ids, "test", "token ids"))


@pytest.mark.parametrize("always_undo", [True, False])
def test_always_undo(llama, ids, always_undo):
    before = state(llama)
    with rotated(context_of(llama, ids), always_undo) as report:
        assert not equal(before, state(llama)) and report["nats_changed"] < 1e-5
    assert equal(before, state(llama)) is always_undo


WRONG = {
    "values": (merging, "turn_rows", lambda values, heads: values),
    "outputs": (merging, "turn_columns", lambda weight, heads, layout: weight),
    "norms": (Originals, "_scale", lambda self, norm: torch.ones_like(norm.weight, dtype=torch.float64)),
    "NaN": (Rotations, "of_tensors", lambda tensors: Rotations(*(None, [tensors["heads-0"] * torch.nan] * 3))),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_rotation_that_is_merged_wrongly_is_found(what, ids, monkeypatch):
    model = uneven(make_model("gemma2" if what == "NaN" else "gemma"))
    before, tied = state(model), ties(model)
    monkeypatch.setattr(*WRONG[what])
    with pytest.raises(RuntimeError, match="computes something else: .* changed by .* nats, expected at most 0.001"):
        prune(model, ids)
    assert unchanged(model, before) and ties(model) == tied


@pytest.mark.parametrize(
    "family", by_day(["gemma", "gemma2", "llama", "mixtral", "qwen2", "phi3"], "gemma", "gemma2", "mixtral")
)
@pytest.mark.parametrize("format, fields", [("dense", {}), ("packed", {"embedding_bits": 8})])
def test_an_ordinary_sparse_model_is_saved(family, format, fields, ids, tmp_path):
    model, used = make_model(family), []
    merge = Originals.merge
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Originals, "merge", lambda self, rotations: used.append(rotations) or merge(self, rotations))
        pruner = prune(model, ids, **fields)
    unties, rotation = family == "gemma", pruner.report.rotation
    assert rotation["unties_head"] is unties and rotation["stream"] is (family != "gemma2")
    assert rotation["objective"][1] < rotation["objective"][0] and rotation["nats_changed"] < 1e-5
    dense = make_model(family)
    Originals(find_rotated(find_decoder(dense))).merge(used[-1])
    if not fields:  # what is kept is the rotated model's
        for (name, found), expected in zip(model.named_parameters(), dense.parameters()):
            kept = found != 0
            assert torch.equal(found[kept], expected[kept]), name
    pruner.save(model, tmp_path, format)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(reloaded, ids), logits(model, ids)) and type(reloaded) is type(model)
    assert json.loads((tmp_path / "config.json").read_text()).get("tie_word_embeddings", True) == (family == "gemma2")
    assert ties(reloaded)[0] is (family == "gemma2")
    if format == "dense":
        with safe_open(tmp_path / "model.safetensors", "pt") as file:
            assert ("lm_head.weight" in file.keys()) == (family != "gemma2")  # noqa: SIM118
    found = inspect_checkpoint(tmp_path)
    assert not found.problems and found.total.sparsity == pytest.approx(pruner.report.achieved_sparsity)
    assert ("head untied from embeddings" in str(pruner.report)) == unties


class Stop(Exception):
    pass


def test_it_goes_on_with_the_recorded_rotation(ids, tmp_path, monkeypatch):
    expected = make_model("gemma")
    whole, put = prune(expected, ids), Records.put

    def stopping(self, name, *args):
        put(self, name, *args)
        if name == "rotation":
            raise Stop

    model = make_model("gemma")
    with monkeypatch.context() as patch:
        patch.setattr(Records, "put", stopping)
        with pytest.raises(Stop):
            prune(model, ids, tmp_path)
    assert list(tmp_path.glob("rotation.*"))
    monkeypatch.setattr(learning.Rotation, "learn", lambda *_args: pytest.fail("it is learned already"))
    resumed = prune(model, ids, tmp_path)
    assert equal(state(model), state(expected)) and resumed.report.rotation == whole.report.rotation
    with pytest.raises(
        ValueError, match="started with different settings: rotate_args was .*'steps': 6.*, is .*'steps': 7"
    ):
        prune(make_model("gemma"), ids, tmp_path, rotate_args={**QUICK, "steps": 7})
