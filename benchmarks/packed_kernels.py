"""Compare one packed projection, sparse or low-bit, with dense ones, in turns, for different numbers of tokens.

    python -m benchmarks.packed_kernels [--sparsity 0.6 0.7 0.8] [--bits 2 3 4 8] [--shapes 128256x2048] [--threads 2]

Several copies of the weight take turns, so that none is in the cache when it is used. OPTIMUM_NEURONAL_KERNEL selects other
kernels.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import cycle

import torch
from torch.nn.functional import linear

from optimum_neuronal.common.display import format_table
from optimum_neuronal.native.library import find_kernel
from optimum_neuronal.packed.formats.packed_matrix import PackedMatrix
from optimum_neuronal.packed.formats.quantized import QuantizedWeight
from optimum_neuronal.packed.formats.sparse import SparseWeight


TOKENS = (1, 4, 8, 16, 64, 512)
BESIDE = ("torch", "packed")
SHAPES = ("8192x2048", "4096x14336")  # rows x columns
COPIES_BYTES = 2**29  # of dense weights together


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


def measure(shape: tuple[int, int], sparsity: float, args: argparse.Namespace) -> list[list[str]]:
    """Return rows of a table: tokens, weights, share of dense bytes, milliseconds, ratios."""
    weights = [torch.randn(shape).bfloat16().masked_fill_(torch.rand(shape) < sparsity, 0)]
    weights += [weights[0].clone() for _ in range(max(2, COPIES_BYTES // weights[0].nbytes) - 1)]
    forms = forms_of(weights[0], args.bits)
    sizes = {name: f"{matrix.nbytes / weights[0].nbytes:.3f}" for name, matrix in forms.items()}
    calls = {name: cycle([copied(matrix) for _ in weights]) for name, matrix in forms.items()}
    dense, table = cycle(weights), []
    for tokens in args.tokens:
        x = torch.randn(tokens, shape[1]).bfloat16()
        times = []
        for _ in range(args.rounds + 1):  # the first warms up
            found = {"torch": seconds(linear, x, next(dense))}
            times.append(found | {name: seconds(next(copies).linear, x) for name, copies in calls.items()})
        medians = {name: statistics.median(found[name] for found in times[1:]) for name in times[0]}
        for name, median in medians.items():
            ratios = [f"{medians[other] / median:.2f}" for other in BESIDE]
            table.append([str(tokens), name, sizes.get(name, "1"), f"{1e3 * median:.2f}", *ratios])
    return table


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
    kernel = find_kernel()
    header = ["tokens", "weights", "bytes", "ms", *(f"times {name}" for name in BESIDE)]
    for shape in (tuple(map(int, shape.split("x"))) for shape in args.shapes):
        for sparsity in args.sparsity:
            name = kernel.name if kernel else "torch"
            print(
                f"\n{shape[0]} x {shape[1]}, bfloat16, {sparsity:.0%} sparse, {args.threads} threads, kernel {name}\n"
            )
            print(format_table(header, measure(shape, sparsity, args)), flush=True)


if __name__ == "__main__":
    main()
