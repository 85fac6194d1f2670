"""Compiles Triton's kernels for GPUs that need not be there, as they would be at a call; run by test_triton_kernels.py."""

import re

import triton
from profiles import NIGHT
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from optimum_neuronal.packed import triton_kernels


TARGETS = (GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx942", 64))
SIZES = ("count", "columns", "rows", "words")


def kernels(backend):
    """Yield kernels with their arguments' types, None and sizes of 1 being constants, as at a call.

    By day one floating-point and one integer dtype, and for HIP one kernel.
    """
    half = dict.fromkeys(("x", "values", "y", "bias"), "bf16")
    yield triton_kernels._multiply, half, {"COUNT": 8, "TOGETHER": 1}
    if backend == "hip" and not NIGHT:
        return
    for dtype in ("bf16", "fp16", "fp32") if NIGHT else ("fp32",):
        yield triton_kernels._multiply, dict.fromkeys(half, dtype), {"COUNT": 1, "TOGETHER": 4}
    ones = {"bias": None, "COUNT": 1, "TOGETHER": 4, "count": 1, "columns": 1, "rows": 1}
    yield triton_kernels._multiply, {name: "bf16" for name in half if name != "bias"}, ones
    for dtype in ("i16", "i32") if NIGHT else ("i32",):
        yield triton_kernels._unpack, {"values": dtype, "dense": dtype}, {"TOGETHER": triton_kernels.UNPACKED}
    yield triton_kernels._unpack, {"values": "i16", "dense": "i16"}, {"TOGETHER": 4, "rows": 1, "columns": 1}


def compiled(kernel, pointers, constants, target):
    constants = {"WORDS": triton_kernels.WORDS, **constants}
    types = {"bits": "*u32", "offsets": "*i64", **dict.fromkeys(SIZES, "i32")}
    types.update({name: f"*{dtype}" for name, dtype in pointers.items()}, **dict.fromkeys(constants, "constexpr"))
    signature = {name: types[name] for name in kernel.arg_names}
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    aligned = {(i,): [["tt.divisibility", 16]] for i, type in enumerate(signature.values()) if type.startswith("*")}
    return triton.compile(ASTSource(kernel, signature, places, aligned), target=target)


for target in TARGETS:
    for kernel, pointers, constants in kernels(target.backend):
        assembly = compiled(kernel, pointers, constants, target).asm
        # Everything in memory is found with 64 bits, which a row of values behind 2**31 needs.
        widths = re.findall(r"tt\.addptr .* : \S+, (?:tensor<\S*x)?(i\d+)", assembly["ttir"])
        assert len(widths) >= 4 and set(widths) == {"i64"}, (kernel, widths)
        if target.backend == "cuda":
            assert "popc.b32" in assembly["ptx"], kernel  # that the compiler knew our way of counting bits
