"""The reference model, and the plans that the authors' code makes, where it departs from its paper.

Read off their public repository: `int(in * s)` weights fall in every row of the block step, `in - int(in * (1 - s))` in
the row step; sparsities are clipped without moving the mean back; the rows of q, k and v follow the input of o, those
of o the input of gate, those of gate and up the input of down; down projections and the last block stay uniform.
"""

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

from optimum_neuronal.blocks.statistics import SquaredNorms
from optimum_neuronal.saliency.plan import SparsityPlan


# The figures come from torch 2.13's kernels for AVX2. Others round differently, which turns single weights around whose
# saliencies are nearly equal; there, figures are compared less strictly.
SAME_KERNELS = torch.__version__.startswith("2.13") and torch.backends.cpu.get_cpu_capability() == "AVX2"
REFERENCE = Path(__file__).parent / "fixtures" / "reference"
WEIGHTS = REFERENCE / "model.safetensors.xz"
TESTS = ("python", "man", "rust")
ROWS_FOLLOW = {
    "self_attn.q_proj": "self_attn.o_proj",
    "self_attn.k_proj": "self_attn.o_proj",
    "self_attn.v_proj": "self_attn.o_proj",
    "self_attn.o_proj": "mlp.gate_proj",
    "mlp.gate_proj": "mlp.down_proj",
    "mlp.up_proj": "mlp.down_proj",
}


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


def rounded_update(self: SquaredNorms, inputs: torch.Tensor, sequences: int) -> None:
    """`SquaredNorms.update` as the authors round: they square the norm of a sequence instead of summing squares.

    It decides single weights where two saliencies differ by less than float32 resolves: at 70 % with Wanda and lambda
    0.2, in row 34 of block 1's up projection, they differ by 2e-8 of their value, and their rounding turns them around.
    """
    tokens = inputs.reshape(sequences, -1, inputs.shape[-1]).transpose(1, 2)
    self._values.append(torch.stack([torch.norm(sequence, p=2, dim=1) ** 2 for sequence in tokens]))


def local_name(name: str) -> str:
    """`"model.layers.3.mlp.up_proj"` -> `"3.mlp.up_proj"`, as the authors' files call it."""
    return name.removeprefix("model.layers.")


def authors_block_targets(sparsity: float, lam: float, blocks: int) -> np.ndarray:
    values = np.arange(blocks, 0, -1) * (2 * lam / (blocks - 1))
    targets = 1 - (values - values.min() - np.mean(values - values.min()) + (1 - sparsity))
    return np.where(targets <= 0, 0.01, np.where(targets >= 1, 0.99, targets))


def authors_block_plan(decoder, targets) -> SparsityPlan:
    plan = {}
    for block, target in zip(decoder.blocks, targets):
        for projection in block.pruned:
            in_features = projection.shape[1]
            plan[projection.name] = int(in_features * target) / in_features
    return SparsityPlan(plan)


def authors_row_sparsity(decoder, targets, lam: float, alignment: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Row sparsities before rounding, by full name; `alignment` is `a_D - a_S` by the authors' names."""
    rows = {}
    for index, block in enumerate(decoder.blocks):
        for projection in block.pruned:
            out_features, local = projection.shape[0], projection.name.removeprefix(block.name + ".")
            density = np.full(out_features, 1 - targets[index])
            if local in ROWS_FOLLOW and index < len(decoder.blocks) - 1:
                values = alignment[f"{index}.{ROWS_FOLLOW[local]}"].astype(np.float64)
                spread = (values - values.min()) / (values.max() - values.min()) * lam * 2
                density = spread - (np.mean(spread) - (1 - targets[index]))
            rows[projection.name] = np.clip(1 - density, 0.01, 0.99)
    return rows


def authors_row_plan(decoder, rows: dict[str, np.ndarray]) -> SparsityPlan:
    plan = {}
    for name, projection in decoder.projections.items():
        in_features = projection.shape[1]
        kept = ((1 - torch.from_numpy(rows[name])) * in_features).long()
        plan[name] = (in_features - kept).double() / in_features
    return SparsityPlan(plan)
