"""rotate=True with weights on disk or in CPU memory (accelerate): as in memory, block by block, and no file changes."""

import functools

import pytest
import torch
from accelerate import cpu_offload
from conftest import make_ids, make_model, make_model_on_disk
from profiles import by_day
from sweeps import checksums, state, unchanged
from transformers import AutoModelForCausalLM
from turning import ties

from optimum_neuronal import NeuronALConfig
from optimum_neuronal.blocks import offload
from optimum_neuronal.compat.accelerate import is_offloaded, weights_map
from optimum_neuronal.pruning.context import check
from optimum_neuronal.rotation.parts import find_parts

from .test_rotate import QUICK, STAGES, fail_at, prune


@functools.cache
def pruned(family, saliency):
    model = make_model(family)
    return model, prune(model, make_ids(), saliency=saliency).report


def maps(model) -> dict:
    return {name: weights_map(module) for name, module in model.named_modules() if is_offloaded(module)}


@pytest.mark.parametrize("saliency", ["wanda", "alps"])
@pytest.mark.parametrize("family", by_day(["bloom", "gemma", "gpt2", "mixtral", "phi3", "qwen2"], "gemma"))
def test_a_model_on_disk_is_rotated_like_one_in_memory(family, saliency, ids, tmp_path):
    """The same masks, weights and report; saved with its own head where the dense one is tied."""
    model, (expected, report) = make_model_on_disk(tmp_path, family), pruned(family, saliency)
    before = checksums(tmp_path / "dense")
    pruner = prune(model, ids, saliency=saliency)
    assert pruner.report.projections == report.projections and pruner.report.rotation == report.rotation
    assert all(parameter.is_meta for parameter in model.parameters()) and checksums(tmp_path / "dense") == before
    assert torch.equal(model(ids).logits, expected(ids).logits)
    pruner.save(model, tmp_path / "sparse")
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "sparse")
    assert unchanged(reloaded, state(expected)) and ties(reloaded)[0] == (family == "bloom")


def test_weights_in_cpu_memory(ids):
    model, (expected, _) = make_model("gemma"), pruned("gemma", "wanda")
    cpu_offload(model, execution_device=torch.device("cpu"))
    prune(model, ids)
    assert torch.equal(model(ids).logits, expected(ids).logits)


@pytest.mark.parametrize("stage", by_day(STAGES, "untying", "learning", "checking", "changes"))
def test_wherever_it_fails_the_model_reads_what_it_did(stage, ids, tmp_path, monkeypatch):
    model = make_model_on_disk(tmp_path, "gemma")
    before, tied, files, read = model(ids).logits, ties(model), checksums(tmp_path / "dense"), maps(model)
    calls = fail_at(monkeypatch, *STAGES[stage], KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        prune(model, ids)
    assert calls and ties(model) == tied and checksums(tmp_path / "dense") == files
    assert all(weights is read[name] for name, weights in maps(model).items())
    assert torch.equal(model(ids).logits, before)


def test_the_learning_reads_weights_when_rows_are_drawn(ids, tmp_path, monkeypatch):
    """Every 5 steps each block once."""
    read, counts = offload._read, []
    for steps in (1, 5, 6, 11):
        model, reads = make_model_on_disk(tmp_path / str(steps), "llama"), []
        monkeypatch.setattr(offload, "_read", lambda block, reads=reads: reads.append(block.name) or read(block))
        prune(model, ids, rotate_args={**QUICK, "steps": steps})
        counts.append(len(reads) - (0 if not counts else counts[0]))
    assert counts[1:] == [0, 3, 6]


@pytest.mark.parametrize("rows", [0.25, 1])
def test_weights_on_disk_are_sampled_as_in_memory(rows, ids, tmp_path):
    on_disk, in_memory = make_model_on_disk(tmp_path, "llama"), make_model("llama")
    arguments = {**QUICK, "rows": rows}
    found, expected = (prune(model, ids, rotate_args=arguments).report for model in (on_disk, in_memory))
    assert found.rotation == expected.rotation and found.projections == expected.projections


@pytest.mark.parametrize("family", ["gemma", "llama"])
def test_an_effort_rotates_as_much_as_in_memory(family, tmp_path):
    """Gemma's head is tied: on disk too, the heads alone are rotated."""
    contexts = [
        check(model, NeuronALConfig(0.6)) for model in (make_model_on_disk(tmp_path, family), make_model(family))
    ]
    found = [find_parts(context.decoder, context.methods.rotation.untie).rotates_stream for context in contexts]
    assert found == [family == "llama"] * 2
