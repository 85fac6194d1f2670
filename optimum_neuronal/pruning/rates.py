"""How fast this machine does what a prune consists of, measured in about a second."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..formats.code_checks import GROUP
from ..formats.codebooks import TABLES, magnitudes
from ..saliency.rounding import round_kept, round_nearest
from ..sparsity.masks import apply_cut, find_cut, sort_rows
from ..trials.output_errors import kl, piece_length


MEASURE_SECONDS = 0.4
MASKED = (1024, 2048)  # shape of the weights that masks are timed on
MADE = (4096, 3072)  # of values that are computed one by one: a C library takes memory anew for so much, as in blocks
ROUNDED, BITS = (1024, GROUP), 4  # the same for rounding, where bits hardly matter


@dataclass(frozen=True)
class Rates:
    """Per second.

    Args:
        products (`float`): floating-point operations of matrix products in the dtype that the model computes in.
        solved (`float`): the same in float32, in which weights are reconstructed.
        compared (`float`): logits, where next-token distributions are compared.
        ranked (`float`): weights, where those of a row are sorted by saliency.
        masked (`float`): weights, where a mask is made of a ranking.
        fitted (`float`): weights, where scales are fitted to values that become few bits.
        swept (`float`): weights, where each such value moves to its best level.
        made (`float`): values that are computed one by one, in the dtype that the model computes in.
    """

    products: float
    solved: float
    compared: float
    ranked: float
    masked: float
    fitted: float
    swept: float
    made: float


def measure_rates(dtype: torch.dtype, device: torch.device, vocabulary: int) -> Rates:
    """Measures all of them on a device.

    Args:
        dtype (`torch.dtype`): of the model.
        device (`torch.device`): where it computes.
        vocabulary (`int`): logits of a position.
    """
    products = measure_matmul_rate(dtype, device)
    solved = products if dtype == torch.float32 else measure_matmul_rate(torch.float32, device)
    return Rates(
        products, solved, _compared(vocabulary, device), *_masked(device), *_rounded(device), _made(dtype, device)
    )


def measure_matmul_rate(dtype: torch.dtype, device: torch.device, seconds: float = MEASURE_SECONDS) -> float:
    """The best rate of square matrix products seen in about so many seconds, in floating-point operations per second.

    Args:
        dtype (`torch.dtype`): of the matrices.
        device (`torch.device`): where they lie.
        seconds (`float`): how long to measure; one product is always finished.
    """
    size, best, end = 128, 0.0, time.perf_counter() + seconds
    matrix = torch.ones(size, size, dtype=dtype, device=device)
    while not best or time.perf_counter() < end:
        elapsed = _time(lambda: matrix @ matrix, device)  # noqa: B023 (called at once)
        best = max(best, 2 * size**3 / elapsed)
        if elapsed < seconds / 100 and size < 8192:  # large enough to keep the device busy, small enough to repeat
            size *= 2
            matrix = torch.ones(size, size, dtype=dtype, device=device)
    return best


def _made(dtype: torch.dtype, device: torch.device) -> float:
    values = torch.ones(MADE, dtype=dtype, device=device)
    return values.numel() / _best(lambda: values * values, device)


def _compared(vocabulary: int, device: torch.device) -> float:
    """As it is done: pieces of the same size, what depends on the dense model alone left out."""
    logits = torch.zeros(piece_length(vocabulary, device), vocabulary, device=device)
    following = torch.zeros(len(logits), dtype=torch.int64, device=device)
    compare = kl(logits)
    return logits.numel() / _best(lambda: compare(logits, following), device)


def _masked(device: torch.device) -> tuple[float, float]:
    saliency = torch.rand(MASKED, generator=torch.Generator().manual_seed(0)).to(device)
    counts = torch.full(MASKED[:1], MASKED[1] // 2)
    ranked = sort_rows(saliency)
    ranking = _best(lambda: sort_rows(saliency), device)
    masking = _best(lambda: torch.where(apply_cut(saliency * 2, find_cut(ranked * 2, counts)), saliency, 0), device)
    return saliency.numel() / ranking, saliency.numel() / masking


def _rounded(device: torch.device) -> tuple[float, float]:
    weight = torch.randn(ROUNDED, generator=torch.Generator().manual_seed(0)).to(device)
    weight, levels = weight.masked_fill_(weight.abs() < 1, 0), magnitudes(TABLES[BITS][0])
    hessian = torch.eye(ROUNDED[1], device=device) + 1
    fitting = _best(lambda: round_nearest(weight, hessian.diagonal(), levels, weight.dtype), device)
    both = _best(lambda: round_kept(weight, weight, hessian, levels, weight.dtype, passes=1), device)
    return weight.numel() / fitting, weight.numel() / max(both - fitting, fitting / 100)


def _best(work: Callable, device: torch.device, times: int = 3) -> float:
    """Seconds of the fastest run but for the first, which warms up."""
    return min([_time(work, device) for _ in range(1 + times)][1:])


def _time(work: Callable, device: torch.device) -> float:
    _wait_for(device)
    start = time.perf_counter()
    work()
    _wait_for(device)
    return time.perf_counter() - start


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
