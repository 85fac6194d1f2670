"""Measure time and processor use of ALPS and SparseGPT on one wide projection.

    python -m benchmarks.reconstruction [--shapes 4096x4096 4096x11008] [--sparsity 0.7] [--threads 2] [--device cpu]

Weights and inputs are random, the inputs correlated as those of language models are (a spectrum that falls off, some
features larger than others). The share of the peak is that of the operations in matrix products, in all the time that a
projection takes, against the best rate of matrix products seen in float32.
"""

import argparse
import time

import torch
from transformers.utils import logging

from optimum_neuronal.common.display import format_table
from optimum_neuronal.common.machine import peak_memory, reset_peak_memory
from optimum_neuronal.saliency.alps import ALPS
from optimum_neuronal.saliency.base import WeightUpdate
from optimum_neuronal.saliency.sparsegpt import SparseGPT


# Operations in matrix products for a weight of (rows, columns). ALPS: of 35 steps of ADMM, after which its support has mostly
# settled, with an inverse at every third, and of ten steps of conjugate gradients.
OPERATIONS = {
    "alps": lambda rows, columns: 2 * rows * columns**2 * (35 + 10 + 2) + 35 // 3 * 2 * columns**3,
    "sparsegpt": lambda rows, columns: 4 * columns**3 // 3 + rows * columns**2,
}


def measure_matmul_rate(device: torch.device, seconds: float) -> float:
    """The best rate of square matrix products in float32 seen in about so many seconds, in operations per second."""
    size, best, end = 128, 0.0, time.perf_counter() + seconds
    while not best or time.perf_counter() < end:
        matrix = torch.ones(size, size, device=device)
        start = time.perf_counter()
        float((matrix @ matrix)[0, 0])
        elapsed = time.perf_counter() - start
        best = max(best, 2 * size**3 / elapsed)
        if elapsed < seconds / 100 and size < 8192:
            size *= 2
    return best


def problem(rows: int, columns: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight of shape (rows, columns), and the Hessian of inputs that it may have."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(rows, columns, generator=generator).mul_(0.02).to(device)
    shared = torch.randn(columns // 4, columns, generator=generator).to(device)
    shared *= torch.linspace(1, 0.05, len(shared), device=device)[:, None]
    hessian = torch.randn(2 * columns, columns, generator=generator).to(device)
    hessian = hessian.T @ hessian * 0.1 + (shared.T @ shared) * 8
    scale = torch.rand(columns, generator=generator).to(device) + 0.2
    return weight, hessian * scale * scale[:, None]


def relative_error(weight: torch.Tensor, sparse: torch.Tensor, hessian: torch.Tensor) -> float:
    """Squared error of the outputs, as a share of the outputs' squares."""
    lost = weight - sparse
    return float(((lost @ hessian) * lost).double().sum() / ((weight @ hessian) * weight).double().sum())


def measure(method: WeightUpdate, weight: torch.Tensor, hessian: torch.Tensor, sparsity: float, peak: float) -> list:
    """A row of the table: method, seconds, share of the peak, memory, error."""
    reset_peak_memory()
    before = peak_memory()["host"]
    start = time.perf_counter()
    sparse = method.prune(weight, hessian, sparsity)
    if weight.device.type != "cpu":
        torch.accelerator.synchronize(weight.device)
    seconds = time.perf_counter() - start
    memory = peak_memory()["host"] - before
    share = OPERATIONS[method.name](*weight.shape) / seconds / peak
    error = relative_error(weight, sparse, hessian)
    return [method.name, f"{seconds:.1f}", f"{share:.0%}", f"{memory / 1e9:.2f}", f"{error:.5f}"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=["4096x4096", "4096x11008"], help="rows x columns")
    parser.add_argument("--sparsity", type=float, default=0.7, help="(default: 0.7)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="(default: as torch decides)")
    parser.add_argument("--device", default="cpu", help="(default: cpu)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    logging.disable_progress_bar()
    device = torch.device(args.device)
    peak = measure_matmul_rate(device, 5)
    header = ["method", "seconds", "share of the peak", "GB beside weight and Hessian", "relative error"]
    for shape in args.shapes:
        weight, hessian = problem(*map(int, shape.split("x")), device)
        print(f"\n{shape}, {args.sparsity:.0%} sparse, {peak:.2e} operations per second at the peak\n")
        rows = [measure(method, weight, hessian, args.sparsity, peak) for method in (SparseGPT(), ALPS())]
        print(format_table(header, rows), flush=True)


if __name__ == "__main__":
    main()
