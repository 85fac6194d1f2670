"""The context of a pruning run: batches, its identity, and threads."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from conftest import make_model
from trial_helpers import same_state

from optimum_neuronal import NeuronALConfig, NeuronALPruner, evaluate_perplexity
from optimum_neuronal.common.torch_state import MemoryLimits
from optimum_neuronal.compat import hf_private
from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.pruning import prepare as preparing
from optimum_neuronal.pruning.prepare import draw_calibration, identity, prepare


def config(**fields):
    return NeuronALConfig(0.5, **{"saliency": "wanda", "topup": "uniform", "num_samples": 12, **fields})


@pytest.mark.parametrize(("device", "given", "expected"), [("cpu", 3, 1), ("cuda", None, 512), ("cuda", 3, 3)])
def test_sequences_run_one_at_a_time_on_a_cpu_and_in_batches_on_an_accelerator(
    device, given, expected, llama, ids, monkeypatch
):
    monkeypatch.setattr(hf_private, "execution_device", lambda _: torch.device(device))
    monkeypatch.setattr(preparing, "called_blocks", lambda decoder, device: (decoder.blocks, None))  # runs nothing
    prepared = prepare(llama, config(), ids, memory=MemoryLimits(batch_size=given))
    assert prepared.evaluator.runner.batch_size == expected, "of 8192 tokens in all"


def test_padded_token_ids_are_refused_in_calibration_and_tests(llama, ids):
    ids[3, -8:] = llama.config.pad_token_id
    for attempt in (lambda: prepare(llama, config(), ids), lambda: evaluate_perplexity(llama, None, ids)):
        with pytest.raises(ValueError, match="1 of 12 rows of token ids are padded: pass rows"):
            attempt()


def test_several_datasets_have_equal_parts_from_the_first_sequence_on(llama, tokenizer, tmp_path):
    """Each gives the windows that it gives alone."""
    names = [str(tmp_path / name) for name in ("a.txt", "b.txt")]
    for seed, name in enumerate(names):
        words = torch.randint(60, (400,), generator=torch.Generator().manual_seed(seed))
        Path(name).write_text(" ".join(f"w{word}" for word in words))

    def draw(dataset, num_samples):
        own = config(num_samples=num_samples, num_alignment_samples=2, seq_length=8, dataset=dataset)
        return draw_calibration(llama, own, tokenizer)

    both, first, second = draw(names, 5), draw(names[0], 3), draw(names[1], 2)
    assert torch.equal(both.ids[::2], first.ids) and torch.equal(both.ids[1::2], second.ids)
    assert torch.equal(both.held_out, torch.stack([first.held_out[:2], second.held_out[:2]], 1).flatten(0, 1))
    assert torch.equal(draw(names, 4).ids, both.ids[:4]) and both.to_dict()["source"] == "a.txt (50%) and b.txt (50%)"
    assert torch.equal(draw(names[:1], 3).ids, first.ids)


def test_the_config_of_the_report_names_data_that_replace_its_own(ids, tokenizer, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("w1 " * 400)
    pruner = NeuronALPruner(config(num_samples=2, seq_length=16, dataset="c4"), tokenizer)
    for given, named in ((text, "text.txt"), (["w1 " * 400], None), (ids, None)):
        pruner.prune(make_model("llama"), given)
        assert pruner.report.config["dataset"] == named


def test_two_models_at_once_are_pruned_as_each_alone(ids):
    """With the random state, the number of threads and the models' hooks as they were."""
    configs = {
        "llama": config(saliency="alps"),
        "mixtral": config(topup="neuronal", topup_args={"block_lambdas": [0.1, 0.2]}, num_alignment_samples=4),
    }

    def prune(family):
        model = NeuronALPruner(configs[family]).prune(make_model(family), ids)
        assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
        return model

    alone = {family: prune(family) for family in configs}
    before = torch.get_num_threads(), torch.random.get_rng_state()
    with ThreadPoolExecutor(2) as executor:
        for family, model in zip(configs, executor.map(prune, configs)):
            assert same_state(model, alone[family].state_dict()), family
    assert torch.get_num_threads() == before[0] and torch.equal(torch.random.get_rng_state(), before[1])


def test_a_run_is_recognized_by_checksums(llama):
    ids = torch.arange(12).view(3, 4)

    def checksums(model=llama, ids=ids, **selection):
        return identity(find_decoder(model, **selection), ids)

    def changed(after):
        return [name for name in before if before[name] != after[name]]

    before = checksums()
    llama.config._name_or_path, llama.config.transformers_version = "elsewhere", "0.0"
    assert checksums(make_model("llama")) == checksums() == before
    assert before["device"] == "cpu" and {len(before[name]) for name in ("model", "calibration data")} == {64}
    assert checksums(ids=ids.T.contiguous().T) == before, "however they lie in memory"
    assert changed(checksums(ids=ids + (ids == 11))) == ["calibration data"]
    for row in (0, -1):
        model = make_model("llama")
        model.model.layers[2].mlp.down_proj.weight.data[row, 0] += 1
        assert changed(checksums(model)) == ["model"]
    for name in ("model.embed_tokens", "model.norm", "lm_head"):
        model = make_model("llama")
        model.get_submodule(name).weight.data *= 2
        assert changed(checksums(model)) == ["model"]
    assert changed(checksums(ignore=["k_proj"])) == changed(checksums(make_model("llama").bfloat16())) == ["model"]
    llama.config.rms_norm_eps *= 2
    assert changed(checksums()) == ["model"]
