"""Compiles Triton's kernels for GPUs that need not be there, as they would be at a call; run by test_triton_sparse.py."""

import re

import triton
from profiles import NIGHT
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from optimum_neuronal.packed import triton_quantized, triton_sparse


TARGETS = (GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx942", 64))
SIZES = ("count", "columns", "rows", "words")


def kernels(backend):
    """Every kernel with its arguments' types, None and sizes of 1 being constants, as at a call.

    By day one floating-point and one integer dtype, codes of 3 and 8 bits, and for HIP one kernel of each module.
    """
    if backend == "hip" and not NIGHT:
        linear = dict.fromkeys(("x", "y", "bias"), "bf16")
        yield triton_sparse._multiply, {"values": "bf16", **linear}, {"COUNT": 8, "TOGETHER": 1}
        yield triton_quantized._multiply, {"codes": "u8", "steps": "bf16", **linear}, quantized(3, 8)
        return
    for dtype in ("bf16", "fp16", "fp32") if NIGHT else ("fp32",):
        linear = {"x": dtype, "values": dtype, "y": dtype, "bias": dtype}
        yield triton_sparse._multiply, linear, {"COUNT": 1, "TOGETHER": 4}
    yield triton_sparse._multiply, dict.fromkeys(("x", "values", "y", "bias"), "bf16"), {"COUNT": 8, "TOGETHER": 1}
    linear = dict.fromkeys(("x", "values", "y"), "bf16")
    yield (
        triton_sparse._multiply,
        linear,
        {"bias": None, "COUNT": 1, "TOGETHER": 4, "count": 1, "columns": 1, "rows": 1},
    )
    for dtype in ("i16", "i32") if NIGHT else ("i32",):
        yield triton_sparse._unpack, {"values": dtype, "dense": dtype}, {"TOGETHER": triton_sparse.UNPACKED}
    yield triton_sparse._unpack, {"values": "i16", "dense": "i16"}, {"TOGETHER": 4, "rows": 1, "columns": 1}

    linear = {"x": "bf16", "y": "bf16", "bias": "bf16"}
    for bits in range(2, 9) if NIGHT else (3, 8):
        held = {"codes": "i8" if bits == 8 else "u8", "steps": "bf16"}
        yield triton_quantized._multiply, {**held, **linear}, quantized(bits, 8)
        yield triton_quantized._unpack, {**held, "dense": "bf16"}, quantized(bits)
    linear = {"codes": "u8", "x": "fp32", "y": "fp32"}
    yield triton_quantized._multiply, linear, {"bias": None, "steps": None, "count": 1, **quantized(4, 1)}


def quantized(bits, count=None):
    """Return the constants of a kernel for quantized weights, as at a call; `count` of a product."""
    own = {"BITS": bits, "ROWS": triton_quantized.ROWS, "COLUMNS": triton_quantized.COLUMNS // (count or 1)}
    return own if count is None else {"COUNT": count, **own}


def compiled(kernel, pointers, constants, target):
    if "WORDS" in kernel.arg_names:
        constants = {"WORDS": triton_sparse.WORDS, **constants}
    types = {"bits": "*u32", "offsets": "*i64", "scales": "*bf16", **dict.fromkeys(SIZES, "i32")}
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
        if target.backend == "cuda" and "bits" in kernel.arg_names:
            assert "popc.b32" in assembly["ptx"], kernel  # that the compiler knew our way of counting bits
