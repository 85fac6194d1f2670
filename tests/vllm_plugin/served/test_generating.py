"""Sparse models in vLLM compute what they compute in transformers, or raise an error of one sentence."""

import json
import os
import subprocess
import sys
from pathlib import Path

import peft
import pytest
import torch
from conftest import make_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import optimum_neuronal
from optimum_neuronal import densify, save_pretrained


DEMO = Path(optimum_neuronal.__file__).parent / "demo" / "tiny_model"
ZEROS, PACKED = {"quantization": "optimum_neuronal"}, {"load_format": "optimum_neuronal"}
KINDS = {"dense": ZEROS, "packed": PACKED}  # format of the checkpoint -> arguments of vLLM
SETTINGS = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1"}


def save(kind: str, folder: Path) -> Path:
    """Save a checkpoint with zeros and its tokenizer. The head of a packed one is packed too, so it is not tied."""
    tied = kind == "dense"
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.bfloat16, tie_word_embeddings=tied)
    if not tied:
        model.lm_head.weight.data.copy_(model.get_input_embeddings().weight)
    for name, weight in model.named_parameters():
        if "proj" in name or "lm_head" in name:
            size = weight.abs().float()
            weight.data[size < size.flatten().quantile(0.3)] = 0
    save_pretrained(model, folder, format=kind)
    AutoTokenizer.from_pretrained(DEMO).save_pretrained(folder)
    return folder


def generate(folder: Path, **arguments) -> tuple[dict | None, str]:
    """Return what generate.py printed, None if it failed, and all that it wrote. Without graphs the engine has no process."""
    command = [sys.executable, Path(__file__).with_name("generate.py"), folder, json.dumps(arguments)]
    alone = {} if arguments.get("enforce_eager") is False else {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    if arguments.get("tensor_parallel_size", 1) > 1:
        alone = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    done = subprocess.run(
        command, env={**SETTINGS, **os.environ, **alone}, capture_output=True, text=True, timeout=300
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    generated = json.loads(lines[0].removeprefix("RESULT ")) if lines and not done.returncode else None
    return generated, done.stdout + done.stderr


@torch.no_grad()
def check(generated, output, model):
    """Given the tokens before it, each is transformers' most likely one; one of 128 may be a near tie."""
    assert generated is not None, output[-4000:]
    same, tokens = 0, 0
    for prompt, new in zip(generated["prompts"], generated["outputs"]):
        logits = model(torch.tensor([prompt + new])).logits[0, len(prompt) - 1 : -1]
        same, tokens = same + int((logits.argmax(-1) == torch.tensor(new)).sum()), tokens + len(new)
    assert tokens == 128 and same >= 127


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_transformers(kind, eager, tmp_path):
    """In float32, which makes few near ties. Inductor compiles the graphs in a process that has read no packed file."""
    folder = save(kind, tmp_path / kind)
    generated, output = generate(folder, dtype="float32", enforce_eager=eager, **KINDS[kind])
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


def test_a_missing_part_of_a_merged_weight_is_an_error(tmp_path):
    file = save("dense", tmp_path / "dense") / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.0.self_attn.k_proj.weight"]
    save_file(tensors, file, {"format": "pt"})
    generated, output = generate(file.parent, **ZEROS)
    assert generated is None and "model.layers.0.self_attn.qkv_proj got" in output


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
