"""One packed projection against dense ones, in turns: where packed weights pay, by tokens at a time.

    python -m benchmarks.packed_kernels [--sparsity 0.6 0.7 0.8] [--threads 2] [--rounds 15]

Beside torch's `F.linear` stands, for one token, a dense loop of our own (`dense_loop.c`, compiled for this processor),
and beside that the bandwidth which it reaches and the one of merely reading. Several copies of the weight are gone
through in turn, so that none is still in a cache when it is needed again. Set OPTIMUM_NEURONAL_KERNEL to measure another
instruction set's kernels.
"""

import argparse
import ctypes
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import torch
from torch.nn.functional import linear

from optimum_neuronal.inference.ops import packed_linear
from optimum_neuronal.inference.packed_rows import PackedRows
from optimum_neuronal.native.build import find_compiler
from optimum_neuronal.native.library import find_kernel
from optimum_neuronal.runtime.tables import format_table
from optimum_neuronal.sparsity.packed import PackedWeight


TOKENS = (1, 4, 8, 16, 64, 512)
SHAPES = ((8192, 2048), (4096, 14336))
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
        """W x for one token, shape (columns,) in float32; the rows are a multiple of 4."""
        y = torch.empty(weight.shape[0])
        self.library.dense_rows(weight.data_ptr(), x.data_ptr(), y.data_ptr(), *weight.shape, torch.get_num_threads())
        return y

    def read(self, weight: torch.Tensor) -> None:
        """Reads every byte of a weight."""
        self.library.read_all(weight.data_ptr(), weight.nbytes // 8, torch.get_num_threads())


def seconds(call: Callable, *arguments) -> float:
    """What a call takes."""
    start = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - start


def measure(shape: tuple[int, int], sparsity: float, rounds: int, loop: DenseLoop) -> tuple[list[list[str]], str]:
    """Rows of a table (tokens, milliseconds of torch, the dense loop and packed, ratios), and a line on bandwidth."""
    count = max(2, COPIES_BYTES // (2 * shape[0] * shape[1]))
    weights = [torch.randn(shape).bfloat16().masked_fill_(torch.rand(shape) < sparsity, 0) for _ in range(count)]
    packed = [PackedRows.of(PackedWeight.pack(weight)) for weight in weights]
    read = statistics.median(seconds(loop.read, weight) for weight in [*weights, *weights])
    copies, table = cycle(zip(weights, packed)), []
    for tokens in TOKENS:
        x = torch.randn(tokens, shape[1]).bfloat16()
        single, times = x[0].float(), []
        for _ in range(rounds + 1):
            weight, form = next(copies)
            found = [seconds(linear, x, weight)]
            if tokens == 1:
                found.append(seconds(loop.multiply, single, next(copies)[0]))
            found.append(seconds(packed_linear, x, form.bits, form.values, form.offsets))
            times.append(found)
        dense, *looped, sparse = (statistics.median(column) for column in zip(*times[1:]))
        own = [f"{1e3 * looped[0]:.2f}", f"{looped[0] / sparse:.2f}"] if looped else ["", ""]
        table.append(
            [str(tokens), f"{1e3 * dense:.2f}", own[0], f"{1e3 * sparse:.2f}", f"{dense / sparse:.2f}", own[1]]
        )
        if looped:
            reached = weights[0].nbytes / looped[0] / 1e9
    return table, f"dense loop {reached:.0f} GB/s, merely reading {weights[0].nbytes / read / 1e9:.0f} GB/s"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sparsity", nargs="+", type=float, default=[0.6, 0.7, 0.8], help="(default: 0.6 0.7 0.8)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="(default: as torch decides)")
    parser.add_argument("--rounds", type=int, default=15, help="(default: 15)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    kernel, loop = find_kernel(), DenseLoop()
    header = ["tokens", "torch ms", "dense loop ms", "packed ms", "times torch", "times loop"]
    for shape in SHAPES:
        for sparsity in args.sparsity:
            table, bandwidth = measure(shape, sparsity, args.rounds, loop)
            print(f"\n{shape[0]} x {shape[1]}, bfloat16, {sparsity:.0%} sparse, {args.threads} threads, kernels "
                  f"{kernel.name if kernel else 'of torch'}; {bandwidth}\n")  # fmt: skip
            print(format_table(header, table), flush=True)


if __name__ == "__main__":
    main()
