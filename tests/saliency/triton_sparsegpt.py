"""SparseGPT's Triton kernel without a GPU; run by test_sparsegpt.py. TRITON_INTERPRET=1 compares it with the plain loop in
Triton's interpreter, TRITON_INTERPRET=0 compiles it for GPUs that need not be there."""

import os
import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parents[1]))  # the folder of random_layers.py

import torch
import triton
from random_layers import hessian_of, weights
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from optimum_neuronal.common import torch_state
from optimum_neuronal.saliency import _triton_sparsegpt as module
from optimum_neuronal.saliency.sparsegpt import SparseGPT, find_kernel, inverse_factor, prune_block


def compare() -> None:
    torch_state.TRITON_DEVICES = ("cpu",)
    assert find_kernel(torch.device("cpu")) is module.prune_block
    for rows, columns, seed in ((1, 1, 0), (70, 12, 1), (5, 16, 2), (33, 7, 3), (40, 128, 4), (3, 130, 5)):
        weight, factor = weights(rows, columns, seed), inverse_factor(hessian_of(columns) + torch.eye(columns))
        factor, mask = factor.contiguous(), weights(rows, columns, seed + 9) > 0
        scale = factor.diagonal().clone()
        scale[columns // 2] = torch.inf
        found, expected = weight.clone(), weight.clone()
        errors = module.prune_block(found, factor, scale, mask)
        torch.testing.assert_close(errors, prune_block(expected, factor, scale, mask), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        assert torch.equal(found == 0, ~mask)
    several = {"q": weights(20, 40), "k": weights(9, 40)}, hessian_of(40), {"q": 0.5, "k": 0.8}
    found = SparseGPT(block_size=16).solve(*several)
    torch_state.TRITON_DEVICES = ()
    find_kernel.cache_clear()
    for name, expected in SparseGPT(block_size=16).solve(*several).items():
        torch.testing.assert_close(found[name], expected, atol=1e-4, rtol=1e-4)


def compile_for_gpus() -> None:
    types = {"weight": "*fp32", "mask": "*u8", "inverse": "*fp32", "factor": "*fp32", "errors": "*fp32"}
    types |= {"rows": "i32", "columns": "i32", "ROWS": "constexpr", "WIDTH": "constexpr"}
    for width in (1, 128):
        constants = {(7,): module.TILE // width, (8,): width}
        for target in [GPUTarget("cuda", arch, 32) for arch in (80, 89, 90)] + [GPUTarget("hip", "gfx942", 64)]:
            triton.compile(ASTSource(module._prune, types, constants), target=target)


if __name__ == "__main__":
    compare() if os.environ["TRITON_INTERPRET"] == "1" else compile_for_gpus()
