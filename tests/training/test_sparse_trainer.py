import copy
import math

import pytest
import torch
from conftest import make_model
from sparse import make_sparse, same_zeros, zeros_of
from torch.nn.functional import log_softmax
from transformers import TrainingArguments
from trial_helpers import same_state

from optimum_neuronal import SparseTrainer, SparsityCallback, evaluate_perplexity
from optimum_neuronal.training.sparse_weights import DenseModelError


@pytest.fixture
def data():
    ids = torch.randint(0, 64, (32, 16), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in ids]


def trainer(model, folder, data, teacher=None, callbacks=None, kl_weight=1.0, **fields):
    defaults = {
        "max_steps": 12, "per_device_train_batch_size": 4, "learning_rate": 5e-3, "save_strategy": "no",
        "report_to": "none", "use_cpu": True, "disable_tqdm": True, "logging_steps": 100, "weight_decay": 0.1,
    }  # fmt: skip
    arguments = TrainingArguments(str(folder), **{**defaults, **fields})
    how = {"teacher": teacher, "kl_weight": kl_weight, "callbacks": callbacks}
    return SparseTrainer(model, arguments, train_dataset=data, eval_dataset=data[:6], **how)


def divergence(model, teacher, data):
    """The mean KL divergence from the teacher."""
    ids = torch.stack([row["input_ids"] for row in data])
    with torch.no_grad():
        own, theirs = (log_softmax(one(input_ids=ids).logits, -1) for one in (model.eval(), teacher))
    return (theirs.exp() * (theirs - own)).sum(-1).mean().item()


@pytest.mark.parametrize("fields", [{}, {"bf16": True}, {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1}])
def test_it_learns_from_the_teacher_and_keeps_every_zero(fields, tmp_path, data):
    model, teacher = make_sparse("llama"), make_model("llama")
    zeros, before, dense = zeros_of(model), divergence(model, teacher, data), copy.deepcopy(teacher.state_dict())
    training = trainer(model, tmp_path, data, teacher, **fields)
    training.train()
    assert same_zeros(model, zeros) and training._student.in_chunks, (
        "in bfloat16 too, for which accelerate wraps the model"
    )
    assert divergence(model, teacher, data) < 0.8 * before
    assert same_state(teacher, dense) and all(p.requires_grad and p.grad is None for p in teacher.parameters())


def test_accumulated_steps_are_those_of_whole_batches(tmp_path, data):
    models = [make_sparse("llama") for _ in range(2)]
    for model, size in zip(models, (4, 2)):
        how = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 4 // size, "optim": "sgd"}
        trainer(model, tmp_path, data, make_model("llama"), **how).train()
    first, second = (model.state_dict() for model in models)
    assert all(torch.allclose(value, second[name], atol=1e-6) for name, value in first.items())


def test_an_evaluation_measures_perplexity(tmp_path, data):
    """Without the teacher, so that models can be compared, and without labels too."""
    model = make_sparse("llama")
    found = trainer(model, tmp_path, data, make_model("llama"), kl_weight=0.5).evaluate()["eval_loss"]
    ids = torch.stack([row["input_ids"] for row in data[:6]])
    assert math.exp(found) == pytest.approx(evaluate_perplexity(model, None, ids), rel=1e-4)
    bare = [{"input_ids": row["input_ids"]} for row in data]
    assert trainer(model, tmp_path, bare).evaluate()["eval_loss"] == found


def test_a_padded_token_is_not_learned(tmp_path, data):
    model, padded = make_sparse("llama"), data[0]["input_ids"].clone()
    padded[10:] = 3
    inputs = {"input_ids": padded[None], "attention_mask": (torch.arange(16) < 10).long()[None]}
    loss = trainer(model, tmp_path, data).compute_loss(model, inputs)
    expected = model(input_ids=padded[None, :10], labels=padded[None, :10]).loss
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)


@pytest.mark.parametrize("given", [None, [SparsityCallback()]])
def test_one_callback_is_enough(given, tmp_path, data):
    made = trainer(make_sparse("llama"), tmp_path, data, callbacks=given)
    assert sum(isinstance(one, SparsityCallback) for one in made.callback_handler.callbacks) == 1


def test_what_does_not_fit_is_refused(tmp_path, data):
    with pytest.raises(ValueError, match="The teacher predicts 32 tokens and the sparse model 64: expected the dense"):
        trainer(make_sparse("llama"), tmp_path, data, make_model("llama", vocab_size=32))
    with pytest.raises(ValueError, match="kl_weight is 2: expected a number from 0 to 1"):
        trainer(make_sparse("llama"), tmp_path, data, kl_weight=2)
    with pytest.raises(
        ValueError, match="computes its own loss: leave out compute_loss_func and label_smoothing_factor"
    ):
        trainer(make_sparse("llama"), tmp_path, data, label_smoothing_factor=0.1)
    with pytest.raises(DenseModelError):
        trainer(make_model("llama"), tmp_path, data).train()
