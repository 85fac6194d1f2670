"""Measure the peak memory of a prune above the model, in blocks: the design allows three and the hidden states.

    python -m benchmarks.memory [--hidden-size 1024] [--blocks 16]

A randomly initialised Llama is pruned by Wanda with both steps of NeuronAL on 8 sequences, in a process of its own; the peak is the
process's largest resident memory (Linux: /proc). Interpreter and libraries are warmed up by pruning a tiny model, and
the C library is told to hand freed memory back at once; left alone, it keeps up to two further blocks for reuse.
"""

import argparse
import os
import sys
from pathlib import Path

import torch
from transformers.utils import logging

from benchmarks.random_models import random_llama
from optimum_neuronal import NeuronALConfig, NeuronALPruner


LAMBDAS = (0.05, 0.1, 0.2)


def resident(key: str, process: int | str = "self") -> int:
    """`VmRSS` (now) or `VmHWM` (largest since the last reset) of a process in bytes; 0 if it has ended."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(key)), 0)


MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden-size", type=int, default=1024, help="(default: 1024)")
    parser.add_argument("--blocks", type=int, default=16, help="(default: 16)")
    parser.add_argument("--tokens", type=int, default=256, help="per sequence (default: 256)")
    parser.add_argument("--sequences", type=int, default=8, help="(default: 8)")
    args = parser.parse_args()
    if not MALLOC.items() <= os.environ.items():  # read when a process starts
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks.memory", *sys.argv[1:]], {**os.environ, **MALLOC})
    logging.disable_progress_bar()
    ids = torch.randint(0, 1000, (args.sequences, args.tokens), generator=torch.Generator().manual_seed(0))
    fields = {
        "saliency": "wanda",
        "topup": "neuronal",
        "dataset": None,
        "num_samples": args.sequences,
        "topup_args": {"block_lambdas": LAMBDAS, "row_lambdas": LAMBDAS},
    }
    config = NeuronALConfig(0.7, **fields)
    NeuronALPruner(config).prune(random_llama(64, 2, args.tokens), ids, batch_size=1)

    model = random_llama(args.hidden_size, args.blocks, args.tokens)
    block = sum(parameter.numel() * parameter.element_size() for parameter in model.model.layers[0].parameters())
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    NeuronALPruner(config).prune(model, ids, batch_size=1)
    peak = resident("VmHWM") - before
    streams = 2 * len(LAMBDAS)  # every candidate's inputs and outputs
    hidden = streams * ids.numel() * args.hidden_size * 4
    print(f"model {before / 1e6:.0f} MB in the process, one block {block / 1e6:.1f} MB")
    print(f"peak above the model: {peak / 1e6:.1f} MB, of which hidden states at most {hidden / 1e6:.1f} MB")
    print(f"without them: {(peak - hidden) / block:.2f} blocks (allowed: 3)")


if __name__ == "__main__":
    main()
