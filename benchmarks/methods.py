"""Compare saliencies and top-ups at three sparsities, on the two trained models and on models that you train.

    python -m benchmarks.methods [--models demo reference DIR ...] [--tables NAME ...] [--output DIR]

Writes benchmarks/methods.md from what it measures of the first two; tables of other models, or some tables alone, are
printed. Finished
combinations are kept in the output directory, so that it goes on after an interruption. The demo's model is tested on
held-out modules of Python's standard library, the reference model (tests/fixtures) on Python source, manual pages and
Rust's documentation, calibrated on manual pages. Other models are directories that examples/train_tiny_model.py wrote.
"""

import argparse
import math
import sys
from collections.abc import Collection
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from optimum_neuronal.comparing.comparing import compare
from optimum_neuronal.comparing.comparison import Comparison
from optimum_neuronal.data.calibration import draw_windows
from optimum_neuronal.demo.run import SEQ_LENGTH, TEST_WINDOWS, TINY_MODEL
from optimum_neuronal.evaluation.perplexity import load_windows
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
    "all top-ups": (("wanda", "magnitude", "multiflow"), ALL_TOPUPS),
    "the other saliencies": (("ria", "sparsegpt"), ("uniform", "owl", "neuronal", "search:levels=False")),
    "ALPS": (("alps",), ("uniform", "owl", "neuronal", "search")),
}
OF_OTHER_MODELS = {
    "six top-ups": (("wanda", "magnitude"), ("uniform", "owl", "besa", "evopress", "neuronal", "search")),
}
ALL_TABLES = (*TABLES, *OF_OTHER_MODELS)
OWN_MODELS = ("demo", "reference")
SPARSITIES = (0.6, 0.7, 0.8)
OUTPUT = Path(__file__).with_suffix(".md")


def load(name: str):
    """Model, calibration ids, test sets of "demo", "reference", or a directory: texts by kind, where it has such."""
    if name == "reference":
        tests = {test: authors.load_ids(f"test_ids_{test}") for test in authors.TESTS}
        return authors.load_model(), authors.load_ids("calibration_ids"), tests
    folder = TINY_MODEL if name == "demo" else Path(name)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = str(folder / "calibration.txt")
    drawn = draw_windows(text, tokenizer, num_samples=128, seq_length=SEQ_LENGTH, seed=0, vocab_size=len(tokenizer))
    texts = sorted(folder.glob("heldout-*.txt")) or [folder / "heldout.txt"]
    shape = (SEQ_LENGTH, TEST_WINDOWS)
    return model, drawn.ids, {text.stem: load_windows(model.config, tokenizer, str(text), *shape) for text in texts}


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


def sections(name: str, wanted: Collection[str], output: Path) -> tuple[list[str], list[str]]:
    """Lines of the tables of excess, and of those with all figures, of one model; of all tables that are wanted."""
    model, ids, tests = load(name)
    title_of_model = f"The {Path(name).name} model"
    tables, figures = [], []
    for title, (saliencies, topups) in (TABLES if name in OWN_MODELS else OF_OTHER_MODELS).items():
        if title not in wanted:
            continue
        comparison = compare(
            model,
            saliencies=saliencies,
            topups=topups,
            sparsities=SPARSITIES,
            dataset=torch.as_tensor(ids),
            evaluate=tests,
            output=output / Path(name).name / title.replace(" ", "-"),
        )
        tables += [f"\n## {title_of_model}, {title}: excess", "", *excess_table(comparison)]
        figures += [f"\n### {title_of_model}, {title}: all figures", "", *comparison.to_markdown().splitlines()[2:]]
    return tables, figures


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=OWN_MODELS, help="of these, or directories (default: both)")
    parser.add_argument("--tables", nargs="+", default=ALL_TABLES, choices=ALL_TABLES, help="(default: all)")
    parser.add_argument("--output", type=Path, default=Path("methods"), help="kept results (default: methods)")
    args = parser.parse_args()
    logging.disable_progress_bar()
    complete = tuple(args.models) == OWN_MODELS and tuple(args.tables) == ALL_TABLES
    text = [(Path(__file__).parent / "methods.head.md").read_text(encoding="utf-8")]
    for name in args.models:
        tables, figures = sections(name, args.tables, args.output)
        text += tables + figures
        if not complete or name not in OWN_MODELS:
            sys.stdout.write("\n".join(tables + figures) + "\n")
    if complete:
        OUTPUT.write_text("\n".join(text) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
