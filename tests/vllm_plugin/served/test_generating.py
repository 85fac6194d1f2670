"""Sparse models in vLLM compute what they compute in transformers, or raise an error of one sentence."""

import os

import peft
import pytest
import torch
from conftest import make_model
from transformers import AutoModelForCausalLM

from optimum_neuronal import densify, save_pretrained

from .checkpoints import KINDS, PACKED, ZEROS, agreeing, save
from .processes import generate


def check(generated, output, model):
    assert generated is not None, output[-4000:]
    same, tokens = agreeing(model, generated["prompts"], generated["outputs"])
    assert tokens == 128 and same >= 127


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_transformers(kind, tmp_path):
    """Given the tokens before it, each is the most likely one; one of 128 may be a near tie. In float32, which makes few."""
    folder = save(kind, tmp_path / kind)
    generated, output = generate(folder, dtype="float32", **KINDS[kind])
    check(generated, output, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one processor for each of two processes")
def test_two_processes_share_a_packed_model(tmp_path):
    """Each has its rows of some weights and its columns of others."""
    folder = save("packed", tmp_path / "model")
    more = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp", "dtype": "float32"}
    generated, output = generate(folder, **PACKED, **more)
    check(generated, output, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))


def test_a_missing_file_is_named(tmp_path):
    folder = save("packed", tmp_path / "packed")
    (file,) = folder.glob("packed-*.safetensors")
    file.unlink()
    generated, output = generate(folder, **PACKED)
    assert generated is None and file.name in output


def test_packed_checkpoints_raise_without_the_load_format(tmp_path):
    generated, output = generate(save("packed", tmp_path / "packed"))
    assert generated is None and "serve it with --load-format optimum_neuronal" in output


def test_moe_models_raise(tmp_path):
    save_pretrained(make_model("mixtral").bfloat16(), tmp_path / "mixture")
    generated, output = generate(tmp_path / "mixture", skip_tokenizer_init=True, max_model_len=16, **ZEROS)
    assert generated is None and "MoE models cannot be served packed" in output


def test_adapters_work_on_packed_weights(tmp_path):
    """Adapters of one part of a merged projection, and of a projection alone."""
    folder = save("packed", tmp_path / "packed")
    adapted = peft.get_peft_model(
        densify(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)),
        peft.LoraConfig(r=8, target_modules=["q_proj", "down_proj"], init_lora_weights=False),
    )
    adapted.save_pretrained(tmp_path / "adapter")
    generated, output = generate(folder, dtype="float32", lora=str(tmp_path / "adapter"), **PACKED)
    check(generated, output, adapted)
