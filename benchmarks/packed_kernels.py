"""One packed projection against torch's dense one, in turns: where packed weights pay, by tokens at a time.

    python -m benchmarks.packed_kernels [--sparsity 0.6 0.7 0.8] [--threads 2] [--rounds 15]

Several copies of the weight are gone through in turn, so that none is still in a cache when it is needed again.
"""

import argparse
import statistics
import time
from itertools import cycle

import torch
from torch.nn.functional import linear

from optimum_neuronal.inference.ops import packed_linear
from optimum_neuronal.inference.packed_rows import PackedRows
from optimum_neuronal.runtime.tables import format_table
from optimum_neuronal.sparsity.packed import PackedWeight


TOKENS = (1, 4, 8, 16, 64, 512)
COPIES_BYTES = 2**28  # of dense weights together


def measure(shape: tuple[int, int], sparsity: float, rounds: int) -> list[list[str]]:
    """Rows of a table: tokens, milliseconds dense and packed, how many times as fast."""
    count = max(2, COPIES_BYTES // (2 * shape[0] * shape[1]))
    weights = [torch.randn(shape).bfloat16().masked_fill_(torch.rand(shape) < sparsity, 0) for _ in range(count)]
    packed = [PackedRows.of(PackedWeight.pack(weight)) for weight in weights]
    copies, rows = cycle(zip(weights, packed)), []
    for tokens in TOKENS:
        x, dense_ms, packed_ms = torch.randn(tokens, shape[1]).bfloat16(), [], []
        for _ in range(rounds):
            weight, form = next(copies)
            start = time.perf_counter()
            linear(x, weight)
            middle = time.perf_counter()
            packed_linear(x, form.bits, form.values, form.offsets)
            dense_ms.append(1e3 * (middle - start))
            packed_ms.append(1e3 * (time.perf_counter() - middle))
        dense, sparse = statistics.median(dense_ms[1:]), statistics.median(packed_ms[1:])
        rows.append([str(tokens), f"{dense:.2f}", f"{sparse:.2f}", f"{dense / sparse:.2f}"])
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sparsity", nargs="+", type=float, default=[0.6, 0.7, 0.8], help="(default: 0.6 0.7 0.8)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="(default: as torch decides)")
    parser.add_argument("--rounds", type=int, default=15, help="(default: 15)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for shape in ((8192, 2048), (4096, 14336)):
        for sparsity in args.sparsity:
            print(f"\n{shape[0]} x {shape[1]}, bfloat16, {sparsity:.0%} sparse, {args.threads} threads\n")
            print(format_table(["tokens", "dense ms", "packed ms", "times"], measure(shape, sparsity, args.rounds)))


if __name__ == "__main__":
    main()
