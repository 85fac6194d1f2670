"""Compare methods on small trained models: ln(perplexity / dense perplexity), the mean over the test sets.

    python -m benchmarks.methods [--models demo reference DIR] [--saliencies wanda alps] [--topups uniform neuronal]

Finished combinations are kept in the output directory, so an interrupted run continues. Other models are directories
that examples/train_tiny_model.py wrote.
"""

import argparse
import math
from pathlib import Path

import torch
from transformers.utils import logging

from benchmarks.shared import load_trained
from optimum_neuronal import compare
from optimum_neuronal.common.display import format_table


def excess(dense: dict[str, float], sparse: dict[str, float]) -> float:
    """Return the mean of ln(perplexity / dense perplexity) over the test sets."""
    return sum(math.log(sparse[name] / value) for name, value in dense.items()) / len(dense)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["demo", "reference"], help="(default: demo reference)")
    parser.add_argument("--saliencies", nargs="+", default=["wanda", "sparsegpt", "alps"], help="(default: three)")
    parser.add_argument(
        "--topups", nargs="+", default=["uniform", "owl", "neuronal", "search"], help="(default: four)"
    )
    parser.add_argument("--sparsity", nargs="+", type=float, default=[0.6, 0.7, 0.8], help="(default: 0.6 0.7 0.8)")
    parser.add_argument("--bits", nargs="+", type=float, help="quantize to these bits per weight instead")
    parser.add_argument("--rotate", action="store_true", help="rotate the model before each prune")
    parser.add_argument("--output", type=Path, default=Path("methods"), help="kept results (default: methods)")
    args = parser.parse_args()
    logging.disable_progress_bar()
    for name in args.models:
        model, ids, tests = load_trained(name)
        how = {"bits_per_weight": args.bits, "sparsities": []} if args.bits else {"sparsities": args.sparsity}
        found = compare(
            model,
            saliencies=[] if args.bits else args.saliencies,
            topups=[] if args.bits else args.topups,
            dataset=torch.as_tensor(ids),
            evaluate=tests,
            output=args.output / f"{Path(name).name}{'-rotated' * args.rotate}",
            **how,
            **({"rotate": True} if args.rotate else {}),
        )
        rows = [
            [
                one.saliency,
                one.topup,
                f"{one.bits_per_weight:.2f} bits" if args.bits else f"{one.sparsity:.0%}",
                one.error or f"{excess(found.dense.perplexity, one.perplexity):.4f}",
            ]
            for one in found.results
        ]
        print(f"\n{name}\n\n{format_table(['saliency', 'top-up', 'target', 'excess'], rows)}", flush=True)


if __name__ == "__main__":
    main()
