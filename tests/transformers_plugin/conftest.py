"""A dense checkpoint to prune while it is loaded, and how."""

import copy

import peft
import pytest
import torch
from conftest import make_model

from optimum_neuronal import NeuronALConfig


@pytest.fixture
def dense(tmp_path, tokenizer):
    """A dense checkpoint with its tokenizer, and text that it can be calibrated with."""
    make_model("llama").save_pretrained(tmp_path / "dense")
    tokenizer.save_pretrained(tmp_path / "dense")
    words = torch.randint(0, 64, (600,), generator=torch.Generator().manual_seed(2)).tolist()
    (tmp_path / "text.txt").write_text(" ".join(f"w{word}" for word in words))
    return tmp_path / "dense"


def config(dense, **fields):
    values = dict(
        topup="uniform", dataset=str(dense.parent / "text.txt"), num_samples=4, num_alignment_samples=2, seq_length=16
    )
    return NeuronALConfig(0.7, **{"saliency": "wanda", **values, **fields})


def used_as_plain(model):
    """Use a model as any other: compute gradients, convert a copy. Return it with an adapter merged that adds nothing."""
    ids = torch.arange(16)[None]
    model(ids, labels=ids).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert copy.deepcopy(model).half().dtype == torch.float16
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"])).merge_and_unload()
