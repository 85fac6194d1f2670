import functools
import threading

import pytest
import torch
from accelerate import cpu_offload
from conftest import make_ids, make_model, make_model_on_disk
from transformers import AutoModelForCausalLM
from trial_helpers import checksums, state, unchanged

from optimum_neuronal import NeuronALConfig, NeuronALPruner, evaluate_perplexity
from optimum_neuronal.blocks import offload
from optimum_neuronal.blocks.offload import BlockLoader, ChangedWeights
from optimum_neuronal.common.torch_state import inference
from optimum_neuronal.compat.hf_private import is_offloaded
from optimum_neuronal.model.find_blocks import find_decoder


LAMBDAS = {"block_lambdas": [0.05, 0.15], "row_lambdas": [0, 0.1]}
CONFIG = NeuronALConfig(0.7, "wanda", topup_args=LAMBDAS, num_samples=12, num_alignment_samples=4)
FAMILIES = ("llama", "gpt2", "mixtral", "gemma4_text", "bamba", "lfm2")


@functools.cache
def pruned(family):
    """A model pruned in memory, and the report of it."""
    pruner = NeuronALPruner(CONFIG)
    return pruner.prune(make_model(family), make_ids()), pruner.report


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_on_disk_is_pruned_and_evaluated_like_one_in_memory(family, ids, tmp_path):
    model = make_model_on_disk(tmp_path, family)
    assert all(parameter.is_meta for parameter in model.parameters())
    before, pruner = checksums(tmp_path / "dense"), NeuronALPruner(CONFIG)
    pruner.prune(model, ids)
    expected, report = pruned(family)
    assert pruner.report.decisions["block"]["candidates"] == report.decisions["block"]["candidates"]
    assert pruner.report.projections == report.projections
    assert all(parameter.is_meta for parameter in model.parameters()), "weights are where they were"
    assert checksums(tmp_path / "dense") == before
    assert torch.equal(model(ids).logits, expected(ids).logits)
    assert evaluate_perplexity(model, None, ids) == evaluate_perplexity(expected, None, ids)

    pruner.save(model, tmp_path / "sparse")
    assert unchanged(AutoModelForCausalLM.from_pretrained(tmp_path / "sparse"), state(expected))


def test_weights_in_cpu_memory(ids, tmp_path):
    model = make_model("llama")
    cpu_offload(model, execution_device=torch.device("cpu"))
    pruner = NeuronALPruner(CONFIG)
    pruner.prune(model, ids)
    pruner.save(model, tmp_path / "sparse")
    assert not hasattr(model, "hf_device_map"), "as it was"
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "sparse")
    assert torch.equal(model(ids).logits, reloaded(ids).logits)
    assert torch.equal(model(ids).logits, pruned("llama")[0](ids).logits)


def test_an_interrupted_prune_leaves_the_model_as_it_was(tmp_path, ids, monkeypatch):
    model = make_model_on_disk(tmp_path, "llama")
    expected = model(ids).logits
    monkeypatch.setattr("optimum_neuronal.trials.alignment.total_error", lambda *_args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        NeuronALPruner(CONFIG).prune(model, ids)
    assert torch.equal(model(ids).logits, expected)
    offloaded = [module for module in model.modules() if is_offloaded(module)]
    assert offloaded and not any(isinstance(module._hf_hook.weights_map, ChangedWeights) for module in offloaded)


def test_only_one_block_is_loaded_and_the_next_one_is_read_ahead(tmp_path, monkeypatch):
    model = make_model_on_disk(tmp_path, "llama")
    decoder = find_decoder(model)
    reads, read = [], offload._read
    monkeypatch.setattr(offload, "_read", lambda b: reads.append((b.name, threading.current_thread())) or read(b))
    loader = BlockLoader(decoder.blocks)
    for index in range(3):
        with loader.loaded(index) as block:
            loaded = [name for name, parameter in model.named_parameters() if not parameter.is_meta]
            assert loaded and all(name.startswith(block.name) for name in loaded)
            assert block.projections[f"{block.name}.mlp.up_proj"].weight.shape == (48, 32)
        assert all(parameter.is_meta for parameter in model.parameters())
    loader._executor.shutdown()
    assert [name for name, _ in reads] == [block.name for block in decoder.blocks], "each once"
    assert [thread == threading.main_thread() for _, thread in reads] == [True, False, False]


def test_trial_forwards_see_the_weights_that_are_set(tmp_path, ids):
    """accelerate's own hooks would read the dense ones again at every forward."""
    model = make_model_on_disk(tmp_path, "llama")
    decoder = find_decoder(model)
    with inference(model), BlockLoader(decoder.blocks).loaded(0) as block:
        projection = block.projections[f"{block.name}.mlp.up_proj"]
        projection.weight.zero_()
        assert not projection.module(torch.ones(1, 32)).any()
    assert projection.module(torch.ones(1, 32)).any(), "what was changed is gone"


@pytest.mark.parametrize("limit", [0, 10**6])
def test_hidden_states_may_wait_in_cpu_memory(limit, ids):
    model = NeuronALPruner(CONFIG).prune(make_model("mixtral"), ids, max_hidden_bytes=limit)
    assert unchanged(model, state(pruned("mixtral")[0]))
