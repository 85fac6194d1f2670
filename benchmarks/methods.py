"""Saliencies and top-ups at three sparsities, on the two trained models at hand.

    python -m benchmarks.methods [--models demo reference] [--output DIR]

Writes benchmarks/methods.md from what it measures. Finished combinations are kept in the output directory, so that it
goes on after an interruption. The demo's model is tested on held-out modules of Python's standard library, the
reference model (tests/fixtures) on Python source, manual pages and Rust's documentation, calibrated on manual pages.
"""

import argparse
import math
from pathlib import Path

import torch
from transformers.utils import logging

from optimum_neuronal.calibration import draw_sequences
from optimum_neuronal.comparing import compare
from optimum_neuronal.comparison import Comparison
from optimum_neuronal.demo import SEQ_LENGTH, TEST_WINDOWS, TINY_MODEL, load_tiny_model
from optimum_neuronal.evaluation import load_windows
from tests import authors


ALL_TOPUPS = (
    "uniform",
    "owl",
    "dlp",
    "alpha_pruning",
    "atp",
    "dsnot",
    "besa",
    "dsa",
    "evopress",
    "neuronal:steps=block",
    "neuronal",
    "search",
)
# Name of a table, which is also the folder of its results -> saliencies, top-ups.
TABLES = {
    "all top-ups": (("wanda", "magnitude"), ALL_TOPUPS),
    "the other saliencies": (("multiflow", "ria", "sparsegpt"), ("uniform", "owl", "neuronal", "search")),
}
SPARSITIES = (0.6, 0.7, 0.8)
OUTPUT = Path(__file__).with_suffix(".md")


def demo():
    """Model, calibration ids, test sets."""
    model, tokenizer = load_tiny_model()
    text = str(TINY_MODEL / "calibration.txt")
    drawn = draw_sequences(text, tokenizer, num_samples=128, seq_length=SEQ_LENGTH, seed=0, vocab_size=len(tokenizer))
    heldout = load_windows(model.config, tokenizer, str(TINY_MODEL / "heldout.txt"), SEQ_LENGTH, TEST_WINDOWS)
    return model, drawn.ids, {"heldout": heldout}


def reference():
    """The same of the reference model."""
    tests = {name: authors.load_ids(f"test_ids_{name}") for name in authors.TESTS}
    return authors.load_model(), authors.load_ids("calibration_ids"), tests


def excess_table(comparison: Comparison) -> list[str]:
    """ln(perplexity / dense perplexity), mean over the test sets: rows are top-ups, columns sparsity and saliency."""
    columns = list(dict.fromkeys((r.sparsity, r.saliency) for r in comparison.results))
    found = {(r.topup, r.sparsity, r.saliency): excess(comparison, r) for r in comparison.results}
    lines = [["top-up", *(f"{saliency} {sparsity:.0%}" for sparsity, saliency in columns)]]
    lines.append(["---"] * len(lines[0]))
    for topup in dict.fromkeys(r.topup for r in comparison.results):
        values = [found.get((topup, *column)) for column in columns]
        best = [min(v for (_, *c), v in found.items() if tuple(c) == column and v is not None) for column in columns]
        cells = ["-" if v is None else f"**{v:.3f}**" if v == b else f"{v:.3f}" for v, b in zip(values, best)]
        lines.append([topup, *cells])
    return ["| " + " | ".join(line) + " |" for line in lines]


def excess(comparison: Comparison, result) -> float | None:
    if result.error is not None:
        return None
    ratios = [result.perplexity[name] / value for name, value in comparison.dense.perplexity.items()]
    return sum(map(math.log, ratios)) / len(ratios)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["demo", "reference"], choices=["demo", "reference"])
    parser.add_argument("--output", type=Path, default=Path("methods"), help="kept results (default: methods)")
    args = parser.parse_args()
    logging.disable_progress_bar()
    text = [(Path(__file__).parent / "methods.head.md").read_text(encoding="utf-8")]
    for name in args.models:
        model, ids, tests = {"demo": demo, "reference": reference}[name]()
        figures = []
        for title, (saliencies, topups) in TABLES.items():
            comparison = compare(
                model,
                saliencies=saliencies,
                topups=topups,
                sparsities=SPARSITIES,
                dataset=torch.as_tensor(ids),
                evaluate=tests,
                output=args.output / name / title.replace(" ", "-"),
            )
            text += [f"\n## The {name} model, {title}: excess", "", *excess_table(comparison)]
            figures += [f"\n### The {name} model, {title}: all figures", ""]
            figures += comparison.to_markdown().splitlines()[2:]
        text += figures
    if set(args.models) == {"demo", "reference"}:
        OUTPUT.write_text("\n".join(text) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
