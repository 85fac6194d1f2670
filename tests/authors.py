"""The reference model, its token ids, and what the authors' code gave on it."""

import copy
import functools
import json
import lzma
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load
from transformers import LlamaConfig, LlamaForCausalLM

from optimum_neuronal.saliency.plan import Plan


# The figures come from torch 2.13's kernels for AVX2. Others round differently, which turns single weights around whose
# saliencies are nearly equal; there, figures are compared less strictly.
SAME_KERNELS = torch.__version__.startswith("2.13") and torch.backends.cpu.get_cpu_capability() == "AVX2"
REFERENCE = Path(__file__).parent / "fixtures" / "reference"
WEIGHTS = REFERENCE / "model.safetensors.xz"
TESTS = ("python", "man", "rust")


def is_left_out() -> bool:
    """Return True in an unpacked sdist without the model. In a checkout a missing one is an error."""
    return not WEIGHTS.exists() and (REFERENCE.parents[2] / "PKG-INFO").exists()


def load_model() -> LlamaForCausalLM:
    """Return a copy of the reference model, which is read once for a session."""
    return copy.deepcopy(_read_model())


@functools.cache
def _read_model() -> LlamaForCausalLM:
    if is_left_out():
        pytest.skip("the reference model, 9 MB, is left out of the sdist: run this test in a checkout")
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(REFERENCE))
    model.load_state_dict(load(lzma.decompress(WEIGHTS.read_bytes())))
    return model.eval()


def load_ids(name: str) -> torch.Tensor:
    with np.load(REFERENCE / "token_ids.npz") as file:
        return torch.from_numpy(file[name].astype(np.int64))


def load_figures() -> dict:
    return json.loads((REFERENCE / "authors.json").read_text())


def local_name(name: str) -> str:
    """`"model.layers.3.mlp.up_proj"` -> `"3.mlp.up_proj"`, as the authors' files call it."""
    return name.removeprefix("model.layers.")


def authors_block_plan(decoder, targets) -> Plan:
    """Return the plan with one sparsity per block, rounded as their code does: `int(in * s)` weights fall per row."""
    plan = {}
    for block, target in zip(decoder.blocks, targets):
        for projection in block.pruned:
            in_features = projection.shape[1]
            plan[projection.name] = int(in_features * target) / in_features
    return Plan(plan)
