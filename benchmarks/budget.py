"""Measure the perplexity of `topup="search"` for several budgets of passes of the alignment sequences.

    python -m benchmarks.budget [--model demo] [--saliency wanda] [--sparsity 0.7] [--budgets 12 20 30 58 100 200]

Prints a table with excess, ln(perplexity / dense perplexity), and the seconds of the search.
"""

import argparse
import math
import tempfile

from transformers.utils import logging

from benchmarks.methods import excess, load
from optimum_neuronal.common.display import format_table
from optimum_neuronal.comparing.comparing import compare


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo", help="demo, reference, or a directory (default: demo)")
    parser.add_argument("--saliency", default="wanda", help="(default: wanda)")
    parser.add_argument("--sparsity", type=float, default=0.7, help="(default: 0.7)")
    parser.add_argument("--budgets", type=int, nargs="+", default=[12, 20, 30, 58, 100, 200])
    args = parser.parse_args()
    logging.disable_progress_bar()
    model, ids, tests = load(args.model)
    topups = ["uniform", "neuronal", *(f"search:budget={budget}" for budget in args.budgets)]
    with tempfile.TemporaryDirectory() as folder:
        comparison = compare(
            model,
            saliencies=[args.saliency],
            topups=topups,
            sparsities=[args.sparsity],
            dataset=ids,
            evaluate=tests,
            output=folder,
        )
    rows = []
    for result in comparison.results:
        spent = result.decisions.get("search", {}).get("spent", "")
        lost = excess(comparison, result)
        factor = math.exp(lost)
        rows.append([result.topup, spent, f"{lost:.3f}", f"{factor:.2f}", f"{result.allocation_seconds:.1f}"])
    print(format_table(["top-up", "passes", "excess", "perplexity x dense", "seconds"], rows))


if __name__ == "__main__":
    main()
