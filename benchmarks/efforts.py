"""Measure excess and seconds of each effort, beside SparseGPT, on trained models.

    python -m benchmarks.efforts [--models demo reference DIR ...] [--sparsity 0.6 0.7 0.8] [--only WORDS ...]

Excess is `ln(perplexity / dense perplexity)`, mean over the test sets; models and texts are those of
`benchmarks.methods`. docs/reconstruction.md has what this measured.
"""

import argparse
import copy
import math
import time

import torch
from transformers.utils import logging

from benchmarks.methods import load
from optimum_neuronal import NeuronALConfig, NeuronALPruner
from optimum_neuronal.common.display import format_table
from optimum_neuronal.evaluation.perplexity import evaluate_perplexity


VARIANTS = {
    "SparseGPT, uniform": {"saliency": "sparsegpt", "topup": "uniform"},
    "SparseGPT, uniform, dense targets": {"saliency": "sparsegpt", "topup": "uniform", "reconstruct": "dense"},
    "SparseGPT, search by score": {"saliency": "sparsegpt", "topup": "search", "topup_args": {"levels": False}},
    "SparseGPT, search on levels": {"saliency": "sparsegpt", "topup": "search"},
    "ALPS, uniform, block": {"saliency": "alps", "topup": "uniform", "reconstruct": "block"},
    "ALPS, uniform": {"saliency": "alps", "topup": "uniform"},
    "ALPS, search by score": {"saliency": "alps", "topup": "search", "topup_args": {"levels": False, "rows": False}},
    "fast": {"effort": "fast"},
    "default, not rotated": {"effort": "default", "rotate": False},
    "default": {"effort": "default"},
    "best, not rotated": {"effort": "best", "rotate": False},
    "best": {"effort": "best"},
}


def log_perplexities(model, tests: dict[str, torch.Tensor]) -> list[float]:
    """Natural logarithms, test by test."""
    return [math.log(evaluate_perplexity(model, None, ids)) for ids in tests.values()]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["demo", "reference"], help="(default: demo reference)")
    parser.add_argument("--sparsity", nargs="+", type=float, default=[0.6, 0.7, 0.8], help="(default: 0.6 0.7 0.8)")
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="(default: all)")
    args = parser.parse_args()
    logging.disable_progress_bar()
    for name in args.models:
        dense, ids, tests = load(name)
        before = log_perplexities(dense, tests)
        for sparsity in args.sparsity:
            rows = []
            for variant in args.only:
                start = time.perf_counter()
                config = NeuronALConfig(sparsity, dataset=None, **VARIANTS[variant])
                model = NeuronALPruner(config).prune(copy.deepcopy(dense), ids)
                seconds = time.perf_counter() - start
                excess = [after - own for after, own in zip(log_perplexities(model, tests), before)]
                rows.append([variant, f"{sum(excess) / len(excess):.4f}", f"{seconds:.0f}"])
            print(f"\n{name}, {sparsity:.0%}\n\n{format_table(['variant', 'excess', 'seconds'], rows)}", flush=True)


if __name__ == "__main__":
    main()
