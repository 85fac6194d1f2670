import copy
import random
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from conftest import make_model
from packed_models import make_zeroed
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from several_processes import in_processes
from sparse import make_sparse, same_zeros, zeros_of
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback
from trial_helpers import same_state

from optimum_neuronal import NeuronALCallback, NeuronALConfig, NeuronALPruner, SparsityCallback
from optimum_neuronal.pruning.prepare import prepare
from optimum_neuronal.pruning.prune import prune_model
from optimum_neuronal.training.keeping import SparsityLostError, read_stored_names

from .conftest import make_arguments


def make_trainer(model, folder, data, *callbacks, **fields):
    defaults = {"max_steps": 4, "per_device_train_batch_size": 2, "learning_rate": 1e-2}
    arguments = make_arguments(folder, **{**defaults, **fields})
    return Trainer(model, arguments, train_dataset=data, eval_dataset=data[:4], callbacks=list(callbacks))


def pruning(**fields):
    schedule = fields.pop("schedule", {0: 0.4, 2: 0.7})
    config = {"saliency": "magnitude", "topup": "uniform", "num_samples": 4, "num_alignment_samples": 2}
    return NeuronALCallback(NeuronALConfig(0.7, **{"saliency": "wanda", **config, **fields}), schedule=schedule)


def is_unhooked(model):
    return not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


def test_no_zero_is_lost(tmp_path, data):
    """Accumulated, clipped, with autocast and checkpoints; without the callback they are lost."""
    for fields in (
        {"optim": "adamw_torch_fused", "gradient_accumulation_steps": 2, "max_grad_norm": 0.1},
        {"optim": "adafactor", "bf16": True, "gradient_checkpointing": True},
    ):
        model = make_sparse()
        zeros, before = zeros_of(model), copy.deepcopy(model.state_dict())
        make_trainer(model, tmp_path, data, SparsityCallback(), **fields).train()
        assert same_zeros(model, zeros) and is_unhooked(model)
        assert all(not torch.equal(value, before[key]) for key, value in model.state_dict().items() if key in zeros)
    make_trainer(model, tmp_path, data, max_steps=1).train()
    assert not same_zeros(model, zeros)


def test_a_single_lost_zero_raises_at_the_end(tmp_path, data):
    model = make_sparse()
    weight = model.model.layers[0].mlp.up_proj.weight.data.view(-1)

    class Vandal(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            weight.index_fill_(0, (weight == 0).nonzero()[0], 1e-6)

    with pytest.raises(SparsityLostError, match="1 pruned weights .*model.layers.0.mlp.up_proj: 1"):
        make_trainer(model, tmp_path, data, SparsityCallback(), Vandal(), max_steps=2).train()


def saving(**fields):
    return {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2, **fields}


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3_moe", "gpt_oss"])
def test_resuming_and_the_best_checkpoint(family, tmp_path, data):
    """Checkpoints are ordinary and sparse; transformers stores experts one by one, under other names than the model's.

    The resumed training ends where the other did.
    """
    model, again = make_sparse(family), make_sparse(family)
    zeros = zeros_of(model)
    make_trainer(model, tmp_path, data, SparsityCallback(), **saving()).train()
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-2")
    assert same_zeros(saved, zeros) and saved.config.sparsity_config == model.config.sparsity_config
    trainer = make_trainer(again, tmp_path, data, SparsityCallback(), **saving())
    trainer.train(resume_from_checkpoint=tmp_path / "checkpoint-2")
    assert same_state(again, model.state_dict())
    steps = set()
    for greater in (True, False):  # the first or the last checkpoint
        best, fields = make_sparse(family), saving(load_best_model_at_end=True, greater_is_better=greater)
        trainer = make_trainer(best, tmp_path / str(greater), data, SparsityCallback(), **fields)
        trainer.train()
        steps.add(trainer.state.best_global_step)
        loaded = AutoModelForCausalLM.from_pretrained(trainer.state.best_model_checkpoint)
        assert same_state(best, loaded.state_dict()) and same_zeros(best, zeros)
    assert steps == {2, 4}


def test_a_callback_that_comes_too_late_for_the_experts_raises(tmp_path, data):
    """Not for others, and not for adapters of such a model."""
    config = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    for make, late, message in (
        (lambda: make_sparse("mixtral"), SparsityCallback, "did not load all weights.*callbacks=.SparsityCallback"),
        (lambda: make_sparse("mixtral"), pruning, "did not load all weights.*callbacks=.NeuronALCallback"),
        (make_sparse, SparsityCallback, None),
        (lambda: get_peft_model(make_sparse("mixtral"), config), SparsityCallback, None),
    ):
        fields = {"save_strategy": "steps", "save_steps": 2}
        make_trainer(make(), tmp_path, data, SparsityCallback(), **fields).train()
        trainer = make_trainer(make(), tmp_path, data, **fields)
        trainer.add_callback(late())
        with pytest.raises(ValueError, match=message) if message else nullcontext():
            trainer.train(resume_from_checkpoint=tmp_path / "checkpoint-2")


def test_experts_that_are_split_between_files_raise(tmp_path, data):
    model = make_sparse("mixtral")
    model.save_pretrained(tmp_path)
    read_stored_names(model)
    whole = load_file(tmp_path / "model.safetensors")
    before = copy.deepcopy(model.state_dict())
    first = {name: 2 * value for name, value in whole.items() if "layers.0" in name}
    model.load_state_dict(first, strict=False)
    assert all(torch.equal(v, (2 if "layers.0" in k else 1) * before[k]) for k, v in model.state_dict().items())
    for part in ("experts.3", "w3"):
        with pytest.raises((RuntimeError, ValueError), match="size mismatch for .*gate_up_proj|non-empty list"):
            model.load_state_dict({k: v for k, v in whole.items() if part not in k}, strict=False)


def test_training_works_again_after_an_error(tmp_path, data):
    model, callback = make_sparse(), SparsityCallback()
    zeros, good = zeros_of(model), data[0]["input_ids"]
    data[0]["input_ids"] = torch.full_like(good, 64)  # beyond the vocabulary
    trainer = make_trainer(model, tmp_path, data, callback, per_device_train_batch_size=32)
    with pytest.raises(IndexError):
        trainer.train()
    data[0]["input_ids"] = good
    trainer.train()
    assert same_zeros(model, zeros) and is_unhooked(model)


class Record(TrainerCallback):
    """Sparsity, and the optimizer's memory of the pruned weights, after every step."""

    def __init__(self):
        self.sparsity, self.memory, self.zeros = {}, {}, []

    def on_step_end(self, args, state, control, model=None, optimizer=None, **kwargs):
        zeros = zeros_of(model)
        self.zeros.append(zeros)
        self.sparsity[state.global_step] = sum(z.sum().item() for z in zeros.values()) / 26112
        self.memory[state.global_step] = sum(
            int((optimizer.state[model.get_parameter(name)]["exp_avg"][zero] != 0).sum())
            for name, zero in zeros.items()
        )


@pytest.mark.parametrize("saliency", ["magnitude", "wanda", "ria", "multiflow", "sparsegpt"])
def test_what_was_zero_stays_zero_when_pruned_further(saliency, ids):
    """The saliency of a zero is the smallest, and SparseGPT, which updates weights, leaves pruned ones."""
    model = make_sparse(sparsity=0.5)
    zeros = zeros_of(model)
    prune_model(
        prepare(model, NeuronALConfig(0.7, saliency=saliency, topup="uniform", num_samples=12), ids, further=True)
    )
    assert all(zeros_of(model)[name][zero].all() for name, zero in zeros.items())


@pytest.mark.parametrize("saliency", ["wanda", "sparsegpt"])
def test_gradual_pruning(tmp_path, data, saliency):
    """What was zero stays zero, though the layers' shares change; and the order of the data does not."""
    model, record, seen = make_model("llama"), Record(), []

    class Batches(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            seen.append((random.random(), torch.rand(1).item()))

    fields = {"topup": "neuronal", "topup_args": {"block_lambdas": [0.1], "steps": "block"}, "saliency": saliency}
    callback = pruning(**fields, schedule={0: 0.4, 2: 0.6, 3: 0.7})
    make_trainer(model, tmp_path, data, callback, record, Batches()).train()
    last = zeros_of(model)
    assert all((last[name] | ~zero).all() for earlier in record.zeros for name, zero in earlier.items())
    assert [record.sparsity[step] for step in (1, 2, 3, 4)] == pytest.approx([0.4, 0.6, 0.7, 0.7], abs=0.02)
    assert set(record.memory.values()) == {0}
    recorded = model.config.sparsity_config
    assert recorded["achieved_sparsity"] == pytest.approx(record.sparsity[4], abs=1e-9) and recorded["sparsity"] == 0.7
    with_pruning, seen[:] = list(seen), []
    make_trainer(make_model("llama"), tmp_path, data, Batches()).train()
    assert seen == with_pruning


def test_pruning_is_that_of_the_pruner(tmp_path, data):
    """Before the first step, with all examples, in the order of the config's seed."""
    model, expected = make_model("llama"), make_model("llama")
    callback = pruning(num_samples=32, num_alignment_samples=4, schedule={0: 0.7})
    make_trainer(model, tmp_path, data, callback, learning_rate=0.0, max_steps=1).train()
    order = random.Random(0).sample(range(32), 32)
    NeuronALPruner(callback.stages[0]).prune(expected, torch.stack([data[index]["input_ids"] for index in order]))
    assert same_state(model, expected.state_dict())


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_schedule_is_resumed(family, tmp_path, data):
    fields = {"save_strategy": "steps", "save_steps": 1, "max_steps": 3}
    whole = make_model(family)
    make_trainer(whole, tmp_path, data, pruning(schedule={1: 0.4, 2: 0.7}), **fields).train()
    for begun, restored in ((1, False), (2, True)):
        model, again = make_model(family), {**fields, "restore_callback_states_from_checkpoint": restored}
        trainer = make_trainer(model, tmp_path / "again", data, pruning(schedule={1: 0.4, 2: 0.7}), **again)
        trainer.train(resume_from_checkpoint=tmp_path / f"checkpoint-{begun}")
        assert same_state(model, whole.state_dict())
        assert model.config.sparsity_config["achieved_sparsity"] == whole.config.sparsity_config["achieved_sparsity"]


def test_the_best_checkpoint_is_one_of_the_last_sparsity(tmp_path, data):
    fields = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1, "max_steps": 3}
    fields |= {"load_best_model_at_end": True, "learning_rate": 0.0}  # dense is best
    model = make_model("llama")
    trainer = make_trainer(model, tmp_path, data, pruning(schedule={2: 0.7}), **fields)
    trainer.train()
    assert trainer.state.best_global_step in (2, 3)
    trainer.train(resume_from_checkpoint=tmp_path / "checkpoint-1")  # dense, unlike the model in memory
    assert sum(zero.sum().item() for zero in zeros_of(model).values()) / 26112 == pytest.approx(0.7, abs=1e-3)


def test_bad_schedules(tmp_path, data, llama):
    config = NeuronALConfig(0.7, num_samples=4, num_alignment_samples=2, saliency="wanda")
    for fields, message in [
        ({"schedule": {-1: 0.7}}, "rising sparsities"),
        ({"schedule": {0: 0.7, 5: 0.5}}, "rising sparsities"),
        ({"schedule": {0: 1.5}}, r"expected a share in \[0, 1\)"),
        ({"schedule": {1: 0.4, "1": 0.5}}, "rising sparsities"),
    ]:
        with pytest.raises(ValueError, match=message):
            NeuronALCallback(config, **fields)
    assert NeuronALCallback(config, schedule={"2": 0.7, np.int64(1): np.float32(0.5)}).schedule == {1: 0.5, 2: 0.7}
    adapted = get_peft_model(make_model("llama"), LoraConfig(target_modules=["q_proj"]))
    for model, callback, message in [
        (llama, NeuronALCallback(config, {5: 0.7}), "prunes at step 5, but training ends at step 4"),
        (llama, pruning(schedule={4: 0.7}, saliency="wanda", num_samples=40), "set num_samples to at most 32"),
        (llama, pruning(schedule={4: 0.7}, targets=["nothing"]), "match no projection"),
        (llama, SparsityCallback(), "The model is dense"),
        (
            make_zeroed("llama"),
            pruning(schedule={4: 0.8}),
            "is already sparse: 69.* Prune the dense model, or fine-tune",
        ),
        (adapted, NeuronALCallback(config, {2: 0.7}), r"call merge_and_unload\(\) first"),
    ]:
        with pytest.raises(ValueError, match=message):
            make_trainer(model, tmp_path, data, callback).train()


def _train_in_two(rank, count, folder, data):
    model = make_sparse()
    zeros = zeros_of(model)
    trainer = make_trainer(model, folder, data, SparsityCallback(), pruning(schedule={2: 0.8}, saliency="wanda"))
    assert trainer.args.world_size == count
    trainer.train()
    assert type(trainer.model_wrapped).__name__ == "DistributedDataParallel"
    for name, zero in zeros.items():
        assert zeros_of(model)[name][zero].all()
        assert (trainer.optimizer.state[model.get_parameter(name)]["exp_avg"][zero] == 0).all()
    torch.save(model.state_dict(), folder / f"{rank}.pt")


def test_two_processes(tmp_path, data):
    in_processes(2, _train_in_two, tmp_path, tmp_path, data)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert all(torch.equal(value, second[key]) for key, value in first.items())
    zeros = sum(int((value == 0).sum()) for key, value in first.items() if "_proj" in key)
    assert zeros / 26112 == pytest.approx(0.8, abs=1e-3)
