"""Measure where the time of NeuronAL's allocation goes, and how near its block forwards are to the hardware's peak.

    python -m benchmarks.allocation [--hidden-size 2048] [--tokens 256] [--threads 2]

A randomly initialised Llama is allocated with both steps. Every function that takes part is wrapped from outside, so
that each second counts once: for the innermost phase that is running. The rate inside the block forwards is compared
with the fastest matrix multiplication of the same process, same type and same threads, measured before and after.
"""

import argparse
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch
from transformers import LlamaForCausalLM
from transformers.utils import logging

from benchmarks.random_models import random_llama
from optimum_neuronal.blocks import runner
from optimum_neuronal.blocks.block_inputs import inference
from optimum_neuronal.blocks.statistics import SquaredNorms
from optimum_neuronal.common.display import format_table
from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.pruning.prune import TOKENS_PER_FORWARD
from optimum_neuronal.saliency import SALIENCIES, masks
from optimum_neuronal.saliency.plan import SparsityPlan
from optimum_neuronal.topup.neuronal import NeuronAL
from optimum_neuronal.trials import alignment, applier
from tests.sweeps import build_sweep


FORWARDS, SCORES, RANKING, CUTS = "block forwards", "scores", "ranking (sort)", "cuts and masks"
TRIALS, STATISTICS, ERRORS, REST = "trial weights", "statistics", "alignment errors", "the rest"
PHASES = (FORWARDS, SCORES, RANKING, CUTS, TRIALS, STATISTICS, ERRORS, REST)
FUNCTIONS = {  # name in these modules, wherever it is -> phase
    "sort_rows": RANKING,
    "find_cut": CUTS,
    "apply_cut": CUTS,
    "mask_rows": RANKING,
    "total_error": ERRORS,
}
VOCABULARY = 1000


class PhaseClock:
    """Seconds by phase: at every moment the phase that was entered last is the one that counts."""

    def __init__(self, device: torch.device):
        self.seconds: dict[str, float] = defaultdict(float)
        self.device, self._open, self._last = device, [REST], now(device)

    def settle(self) -> None:
        moment = now(self.device)
        self.seconds[self._open[-1]] += moment - self._last
        self._last = moment

    def enter(self, phase: str) -> None:
        self.settle()
        self._open.append(phase)

    def leave(self) -> None:
        self.settle()
        self._open.pop()

    @contextmanager
    def phase(self, phase: str) -> Iterator[None]:
        self.enter(phase)
        try:
            yield
        finally:
            self.leave()

    def timed(self, function: Callable, phase: str) -> Callable:
        def wrapper(*args, **kwargs):
            with self.phase(phase):
                return function(*args, **kwargs)

        return wrapper

    def entering(self, context: Callable, phase: str) -> Callable:
        """A context manager whose way in and way out count for the phase, but not what runs inside it."""

        @contextmanager
        def wrapper(*args, **kwargs):
            self.enter(phase)
            with context(*args, **kwargs):
                self.leave()
                yield
                self.enter(phase)
            self.leave()

        return wrapper


class Operations:
    """Counts the floating-point operations that block forwards cannot do without.

    Two for every weight of a projection that is not skipped, and token; and, in every block whose output is not
    altogether skipped, the two products of causal attention: each token with itself and all before it.
    """

    def __init__(self):
        self.total = 0

    def counting(self, replay: Callable) -> Callable:
        def wrapper(block, hidden, calls, record=None, skipped=()):
            run = [projection for projection in block.projections.values() if projection not in skipped]
            weights = sum(math.prod(projection.shape) for projection in run)
            for states in hidden:
                sequences, tokens, features = states.shape
                attention = 2 * 2 * features * tokens * (tokens + 1) // 2 if run else 0
                self.total += sequences * (2 * weights * tokens + attention)
            return replay(block, hidden, calls, record, skipped)

        return wrapper


def now(device: torch.device) -> float:
    if device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter()


@contextmanager
def measured(decoder, clock: PhaseClock, operations: Operations) -> Iterator[None]:
    """While the context lasts, clock and operations see what the allocation does."""
    with ExitStack() as stack:
        for module in (masks, applier, alignment):
            for name in FUNCTIONS.keys() & vars(module).keys():
                timed = clock.timed(getattr(module, name), FUNCTIONS[name])
                stack.enter_context(patch.object(module, name, timed))
        for owner, name, phase in (
            (applier.PlanApplier, "score", SCORES),
            (applier.PlanApplier, "activations", STATISTICS),
            (SparsityPlan, "row_counts", CUTS),
            (SquaredNorms, "update", STATISTICS),
        ):
            stack.enter_context(patch.object(owner, name, clock.timed(getattr(owner, name), phase)))
        stack.enter_context(patch.object(alignment, "trial_weights", clock.entering(alignment.trial_weights, TRIALS)))
        stack.enter_context(patch.object(runner, "replay", operations.counting(runner.replay)))
        for block in decoder.blocks:
            handles = (
                block.module.register_forward_pre_hook(lambda *_: clock.enter(FORWARDS)),
                block.module.register_forward_hook(lambda *_: clock.leave()),
            )
            for handle in handles:
                stack.callback(handle.remove)
        yield


def matmul_peak(shapes, dtype: torch.dtype, device: torch.device, seconds: float = 0.5) -> dict[tuple, float]:
    """Operations per second of the fastest of several products (m, k) @ (n, k).T, by (m, k, n)."""
    rates = {}
    for m, k, n in shapes:
        left, right = (torch.randn(rows, k, device=device).to(dtype) for rows in (m, n))
        product = torch.empty(m, n, device=device, dtype=dtype)
        torch.mm(left, right.T, out=product)
        fastest, start = math.inf, now(device)
        while now(device) - start < seconds:
            begin = now(device)
            torch.mm(left, right.T, out=product)
            fastest = min(fastest, now(device) - begin)
        rates[m, k, n] = 2 * m * k * n / fastest
    return rates


def make_model(args) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = random_llama(args.hidden_size, args.blocks, args.tokens, VOCABULARY, args.head_dim, dtype=args.dtype)
    return model.to(args.device, getattr(torch, args.dtype))


def allocate(model, ids: torch.Tensor, args, lambdas: tuple[float, ...]) -> tuple[PhaseClock, Operations]:
    decoder, clock, operations = find_decoder(model), PhaseClock(torch.device(args.device)), Operations()
    batch_size = max(1, TOKENS_PER_FORWARD // ids.shape[1])
    with inference(model), measured(decoder, clock, operations):
        sweep = build_sweep(decoder, SALIENCIES.get("wanda")(), ids, len(ids), batch_size, args.device)
        NeuronAL(reference=args.reference, block_lambdas=lambdas, row_lambdas=(0.0, *lambdas)).allocate(sweep, 0.7)
        clock.settle()
    return clock, operations


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden-size", type=int, default=2048, help="(default: 2048)")
    parser.add_argument("--head-dim", type=int, default=128, help="(default: 128)")
    parser.add_argument("--blocks", type=int, default=3, help="(default: 3)")
    parser.add_argument("--sequences", type=int, default=8, help="(default: 8)")
    parser.add_argument("--tokens", type=int, default=256, help="per sequence (default: 256)")
    parser.add_argument("--lambdas", type=float, nargs="+", default=[0.05, 0.1, 0.2], help="(default: 0.05 0.1 0.2)")
    parser.add_argument("--reference", default="sparse-stream", help="or dense (default: sparse-stream)")
    parser.add_argument("--dtype", default="float32", help="(default: float32)")
    parser.add_argument("--device", default="cpu", help="(default: cpu)")
    parser.add_argument(
        "--threads", type=int, default=torch.get_num_threads(), help="of torch (default: as torch decides)"
    )
    return parser.parse_args()


def print_result(args, clock: PhaseClock, operations: Operations, before: dict, after: dict) -> None:
    total, forwards = sum(clock.seconds.values()), clock.seconds[FORWARDS]
    print(
        f"{args.blocks} blocks of hidden size {args.hidden_size}, {args.sequences} x {args.tokens} tokens, {args.dtype}, "
        f"{args.device}, {args.threads} thread(s), {args.reference}, lambdas {args.lambdas}\n"
    )
    rows = [[phase, f"{clock.seconds[phase]:.2f}", f"{clock.seconds[phase] / total:.1%}"] for phase in PHASES]
    print(format_table(["phase", "seconds", "share"], [*rows, ["total", f"{total:.2f}", "100.0%"]]))
    rates = {shape: max(before[shape], after[shape]) for shape in before}
    fastest = max(rates, key=rates.get)
    achieved = operations.total / forwards
    print(f"\noperations needed in block forwards: {operations.total / 1e12:.2f} T")
    print(f"rate inside block forwards: {achieved / 1e9:.0f} G/s")
    first, second = (max(side.values()) / 1e9 for side in (before, after))
    print(f"matrix-multiply peak: {first:.0f} G/s before, {second:.0f} G/s after, of (m, k, n) = {fastest}")
    print(f"share of the higher peak inside block forwards: {achieved / rates[fastest]:.0%} (goal: at least 50%)")
    print(f"share of time outside block forwards: {1 - forwards / total:.1%} (goal: at most 15%)")


def main():
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    logging.disable_progress_bar()
    dtype, device = getattr(torch, args.dtype), torch.device(args.device)
    model = make_model(args)
    ids = torch.randint(0, VOCABULARY, (args.sequences, args.tokens), generator=torch.Generator().manual_seed(0))
    size, inner = args.hidden_size, model.config.intermediate_size
    tokens = min(args.sequences * args.tokens, max(args.tokens, TOKENS_PER_FORWARD))
    shapes = [(n, n, n) for n in (1024, 2048, 4096)] + [(tokens, size, inner), (tokens, inner, size)]
    allocate(model, ids[:1, :16], args, tuple(args.lambdas[:1]))  # warms up
    before = matmul_peak(shapes, dtype, device)
    clock, operations = allocate(model, ids, args, tuple(args.lambdas))
    after = matmul_peak(shapes, dtype, device)
    print_result(args, clock, operations, before, after)


if __name__ == "__main__":
    main()
