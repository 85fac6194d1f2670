"""Compare one packed projection with the dense one, alternately, for different numbers of tokens.

    python -m benchmarks.packed_kernels [--sparsity 0.6 0.7 0.8] [--shapes 128256x2048] [--threads 2]

Several copies of the weight take turns, so that none is in the cache when it is used. OPTIMUM_NEURONAL_KERNEL selects other
kernels.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle

import torch
from torch.nn.functional import linear

from optimum_neuronal.common.display import format_table
from optimum_neuronal.native.library import find_kernel
from optimum_neuronal.packed.packed_weight import PackedWeight


TOKENS = (1, 4, 8, 16, 64, 512)
SHAPES = ("8192x2048", "4096x14336")  # rows x columns
COPIES_BYTES = 2**29  # of dense weights together


def seconds(call: Callable, *arguments) -> float:
    """Return the seconds that a call takes."""
    start = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - start


def copied(weight: PackedWeight) -> PackedWeight:
    """Return the same weight elsewhere in memory."""
    mask, values, offsets = (tensor.clone() for tensor in weight.tensors())
    return replace(weight, mask=mask, values=values, offsets=offsets)


def measure(shape: tuple[int, int], sparsity: float, args: argparse.Namespace) -> list[list[str]]:
    """Return rows of a table: tokens, milliseconds dense and packed, and their ratio."""
    weight = torch.randn(shape).bfloat16().masked_fill_(torch.rand(shape) < sparsity, 0)
    copies, packed = max(2, COPIES_BYTES // weight.nbytes), PackedWeight.pack(weight)
    dense_weights = cycle([weight.clone() for _ in range(copies)])
    packed_weights = cycle([copied(packed) for _ in range(copies)])
    table = []
    for tokens in args.tokens:
        x = torch.randn(tokens, shape[1]).bfloat16()
        times = []
        for _ in range(args.rounds + 1):  # the first warms up
            times.append((seconds(linear, x, next(dense_weights)), seconds(next(packed_weights).multiply, x)))
        dense, sparse = (1e3 * statistics.median(column) for column in zip(*times[1:]))
        table.append([str(tokens), f"{dense:.3f}", f"{sparse:.3f}", f"{dense / sparse:.2f}"])
    return table


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sparsity", nargs="+", type=float, default=[0.6, 0.7, 0.8], help="(default: 0.6 0.7 0.8)")
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help=f"rows x columns (default: {' '.join(SHAPES)})")
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS, help="at a time (default: 1 4 8 16 64 512)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="(default: as torch decides)")
    parser.add_argument("--rounds", type=int, default=15, help="(default: 15)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    kernel = find_kernel()
    for shape in (tuple(map(int, shape.split("x"))) for shape in args.shapes):
        for sparsity in args.sparsity:
            name = kernel.name if kernel else "torch"
            print(
                f"\n{shape[0]} x {shape[1]}, bfloat16, {sparsity:.0%} zeros, {args.threads} threads, kernel {name}\n"
            )
            header = ["tokens", "dense, ms", "packed, ms", "dense / packed"]
            print(format_table(header, measure(shape, sparsity, args)), flush=True)


if __name__ == "__main__":
    main()
