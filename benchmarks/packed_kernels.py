"""Compare one packed projection, sparse or low-bit, with dense ones, in turns, for different numbers of tokens.

    python -m benchmarks.packed_kernels [--sparsity 0.6 0.7 0.8] [--bits 2 3 4 8] [--shapes 128256x2048] [--threads 2]

For one token it also times a dense loop in C (`dense_loop.c`), and prints its bandwidth and that of reading only. Several
copies of the weight take turns, so that none is in a cache when it is used. OPTIMUM_NEURONAL_KERNEL selects other kernels.
"""

import argparse
import ctypes
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import torch
from torch.nn.functional import linear

from optimum_neuronal.common.display import format_table
from optimum_neuronal.native.build import find_compiler
from optimum_neuronal.native.library import find_kernel
from optimum_neuronal.packed.formats.packed_matrix import PackedMatrix
from optimum_neuronal.packed.formats.quantized import QuantizedWeight
from optimum_neuronal.packed.formats.sparse import SparseWeight


TOKENS = (1, 4, 8, 16, 64, 512)
BESIDE = ("torch", "dense loop", "packed")
SHAPES = ("8192x2048", "4096x14336")  # rows x columns
COPIES_BYTES = 2**29  # of dense weights together
FLAGS = ("-O3", "-march=native", "-ffast-math", "-fopenmp", "-shared", "-fPIC")


class DenseLoop:
    """The compiled loops of `dense_loop.c`."""

    def __init__(self):
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder) / "dense_loop.so"
            source = Path(__file__).with_name("dense_loop.c")
            subprocess.run([*find_compiler(), *FLAGS, str(source), "-o", str(target)], check=True)
            self.library = ctypes.CDLL(str(target))
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        self.library.dense_rows.argtypes = (pointer, pointer, pointer, size, size, ctypes.c_int)
        self.library.read_all.argtypes = (pointer, size, ctypes.c_int)
        self.library.read_all.restype = ctypes.c_uint64

    def multiply(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return W x for one token x of shape (columns,), float32. The number of rows is a multiple of 4."""
        y = torch.empty(weight.shape[0])
        self.library.dense_rows(weight.data_ptr(), x.data_ptr(), y.data_ptr(), *weight.shape, torch.get_num_threads())
        return y

    def read(self, weight: torch.Tensor) -> None:
        """Read every byte of a weight."""
        self.library.read_all(weight.data_ptr(), weight.nbytes // 8, torch.get_num_threads())


def seconds(call: Callable, *arguments) -> float:
    """Return the seconds that a call takes."""
    start = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - start


def forms_of(weight: torch.Tensor, bits: Sequence[int]) -> dict[str, PackedMatrix]:
    """Return the packed forms of a weight, by name."""
    quantized = {f"{few} bits": QuantizedWeight.nearest(weight, few) for few in bits}
    return {"packed": SparseWeight.pack(weight), **quantized}


def copied(matrix: PackedMatrix) -> PackedMatrix:
    """Return the same matrix elsewhere in memory."""
    return replace(matrix, **{name: tensor.clone() for name, tensor in matrix.tensors().items()})


def measure(shape: tuple[int, int], sparsity: float, args: argparse.Namespace, loop: DenseLoop) -> tuple[list, str]:
    """Return rows of a table (tokens, weights, share of dense bytes, milliseconds, ratios), and a line on bandwidth."""
    weights = [torch.randn(shape).bfloat16().masked_fill_(torch.rand(shape) < sparsity, 0)]
    weights += [weights[0].clone() for _ in range(max(2, COPIES_BYTES // weights[0].nbytes) - 1)]
    forms = forms_of(weights[0], args.bits)
    sizes = {name: f"{matrix.nbytes / weights[0].nbytes:.3f}" for name, matrix in forms.items()}
    calls = {name: cycle([copied(matrix) for _ in weights]) for name, matrix in forms.items()}
    read = statistics.median(seconds(loop.read, weight) for weight in [*weights, *weights])
    dense, table, reached = cycle(weights), [], 0.0
    for tokens in args.tokens:
        x = torch.randn(tokens, shape[1]).bfloat16()
        single, times = x[0].float(), []
        for _ in range(args.rounds + 1):
            found = {"torch": seconds(linear, x, next(dense))}
            if tokens == 1:
                found["dense loop"] = seconds(loop.multiply, single, next(dense))
            times.append(found | {name: seconds(next(copies).linear, x) for name, copies in calls.items()})
        medians = {name: statistics.median(found[name] for found in times[1:]) for name in times[0]}
        for name, median in medians.items():
            ratios = [medians[other] / median if other in medians else None for other in BESIDE]
            shown = ["" if ratio is None else f"{ratio:.2f}" for ratio in ratios]
            table.append([str(tokens), name, sizes.get(name, "1"), f"{1e3 * median:.2f}", *shown])
        reached = weights[0].nbytes / medians["dense loop"] / 1e9 if tokens == 1 else reached
    return table, f"dense loop {reached:.0f} GB/s, merely reading {weights[0].nbytes / read / 1e9:.0f} GB/s"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sparsity", nargs="+", type=float, default=[0.6, 0.7, 0.8], help="(default: 0.6 0.7 0.8)")
    parser.add_argument(
        "--bits", nargs="*", type=int, default=[2, 3, 4, 8], help="of low-bit weights (default: 2 3 4 8)"
    )
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help=f"rows x columns (default: {' '.join(SHAPES)})")
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS, help="at a time (default: 1 4 8 16 64 512)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="(default: as torch decides)")
    parser.add_argument("--rounds", type=int, default=15, help="(default: 15)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    kernel, loop = find_kernel(), DenseLoop()
    header = ["tokens", "weights", "bytes", "ms", *(f"times {name}" for name in BESIDE)]
    for shape in (tuple(map(int, shape.split("x"))) for shape in args.shapes):
        for sparsity in args.sparsity:
            table, bandwidth = measure(shape, sparsity, args, loop)
            print(f"\n{shape[0]} x {shape[1]}, bfloat16, {sparsity:.0%} sparse, {args.threads} threads, kernels "
                  f"{kernel.name if kernel else 'of torch'}; {bandwidth}\n")  # fmt: skip
            print(format_table(header, table), flush=True)


if __name__ == "__main__":
    main()
