"""What keeping a model sparse costs: seconds of a training step with and without, and memory of the masks.

    python -m benchmarks.training [--hidden-size 512] [--blocks 4] [--tokens 256 1024 2048] [--dtype float32]

A randomly initialised Llama, pruned by magnitude to 70 %, is trained with fused AdamW on random tokens, on the accelerator
if there is one. Steps with and without `keep_sparsity` alternate, and medians are compared, since a machine's speed drifts.
"""

import argparse
import statistics
import time

import torch
from transformers import LlamaForCausalLM
from transformers.utils import logging

from benchmarks.random_models import random_llama
from optimum_neuronal import NeuronALConfig, NeuronALPruner, keep_sparsity
from optimum_neuronal.common.display import format_table


def make_model(hidden_size: int, blocks: int, dtype: str) -> LlamaForCausalLM:
    model = random_llama(hidden_size, blocks, tokens=4096).to(getattr(torch, dtype))
    return NeuronALPruner(NeuronALConfig(0.7, saliency="magnitude", topup="uniform")).prune(model)


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


def step_seconds(model, optimizer, ids) -> float:
    """Of the wall clock on an accelerator; on a CPU those that were computed, whatever else runs there."""
    clock = time.process_time if ids.device.type == "cpu" else time.perf_counter
    synchronize(ids.device)
    start = clock()
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    synchronize(ids.device)
    return clock() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden-size", type=int, default=512, help="(default: 512)")
    parser.add_argument("--blocks", type=int, default=4, help="(default: 4)")
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 1024, 2048], help="of a step")
    parser.add_argument("--steps", type=int, default=15, help="of each kind (default: 15)")
    parser.add_argument("--dtype", default="float32", help="of the weights (default: float32)")
    args = parser.parse_args()
    logging.disable_progress_bar()
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    model = make_model(args.hidden_size, args.blocks, args.dtype).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    masks = keep_sparsity(model).weights
    bits, weights = (sum(size) * 8 for size in zip(*((w.mask.bits.nbytes, w.owner.numel() / 8) for w in masks)))
    print(f"{weights / 1e6:.1f} M weights in projections; the masks take {bits / weights:.3f} bits for each.")
    rows = []
    for tokens in args.tokens:
        ids = torch.randint(0, 1000, (max(1, tokens // 256), min(256, tokens)), device=device)
        seconds: list[list[float]] = [[], []]  # of steps without, and with
        keeper = keep_sparsity(model)
        for index in range(2 * args.steps + 4):
            if index % 2:
                keeper.__enter__()
            seconds[index % 2].append(step_seconds(model, optimizer, ids))
            keeper.release()
        plain, masked = (statistics.median(times[2:]) for times in seconds)
        rows.append([tokens, f"{plain * 1000:.1f}", f"{masked * 1000:.1f}", f"{masked / plain - 1:.1%}"])
    print(format_table(["tokens per step", "ms", "ms, kept sparse", "more"], rows))


if __name__ == "__main__":
    main()
