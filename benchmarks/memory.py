"""Measure the peak memory of a prune above the model, in blocks.

    python -m benchmarks.memory [--hidden-size 1024] [--blocks 16]

A random Llama is pruned by Wanda with both steps of NeuronAL on 8 sequences. The peak is the process's largest resident
memory (Linux). Pruning a tiny model first loads all libraries.
"""

import argparse
import os
import sys
from pathlib import Path

import torch
from transformers.utils import logging

from benchmarks.shared import MALLOC, random_llama, resident
from optimum_neuronal import NeuronALConfig, NeuronALPruner


LAMBDAS = (0.05, 0.1, 0.2)


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
    lambdas = {"block_lambdas": LAMBDAS, "row_lambdas": LAMBDAS}
    fields = {"saliency": "wanda", "topup": "neuronal", "topup_args": lambdas, "num_samples": args.sequences}
    config = NeuronALConfig(0.7, dataset=None, **fields)
    NeuronALPruner(config).prune(random_llama(64, 2, args.tokens), ids, batch_size=1)

    model = random_llama(args.hidden_size, args.blocks, args.tokens)
    block = sum(parameter.nbytes for parameter in model.model.layers[0].parameters())
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    NeuronALPruner(config).prune(model, ids, batch_size=1)
    peak = resident("VmHWM") - before
    hidden = 2 * len(LAMBDAS) * ids.numel() * args.hidden_size * 4  # inputs and outputs of every candidate
    print(
        f"one block {block / 1e6:.1f} MB; peak above the model {peak / 1e6:.1f} MB, hidden states {hidden / 1e6:.1f} MB"
    )
    print(f"without hidden states: {(peak - hidden) / block:.2f} blocks (the design allows 3)")


if __name__ == "__main__":
    main()
