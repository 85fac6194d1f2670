"""Compare all figures of the authors' code on the reference model with ours, and write benchmarks/authors.md.

    python -m benchmarks.authors

For magnitude, Wanda and MULTIFLOW at 60, 70 and 80 %: perplexities after uniform pruning and after the authors' block
and row plans (which depart from the paper: see tests/authors.py), each step's lambda by our alignment errors, and what
our own NeuronAL with its defaults reaches.
"""

import math
from pathlib import Path
from unittest.mock import patch

import numpy as np
from transformers.utils import logging

from optimum_neuronal import NeuronALConfig, NeuronALPruner, evaluate_perplexity
from optimum_neuronal.blocks.block_inputs import inference
from optimum_neuronal.blocks.statistics import SquaredNorms
from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.pruning.final_pass import FinalPruning, apply_changes
from optimum_neuronal.saliency import SALIENCIES
from optimum_neuronal.saliency.plan import SparsityPlan
from tests import authors
from tests.sweeps import build_sweep


MEASURED_ON = ("sparse-stream", "pooled", "l2")


def perplexities(model) -> list[float]:
    return [evaluate_perplexity(model, None, authors.load_ids(f"test_ids_{t}"), batch_size=8) for t in authors.TESTS]


def geometric_mean(values) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


class Setting:
    """One saliency at one sparsity, with the authors' plans."""

    def __init__(self, saliency: str, sparsity: float, figures: dict):
        self.sparsity, self.figures = sparsity, figures
        self.model = authors.load_model()
        self.decoder = find_decoder(self.model)
        self.sweep = build_sweep(self.decoder, SALIENCIES.get(saliency)(), authors.load_ids("calibration_ids"), 8, 8)

    def scores(self, plans: list[SparsityPlan], figures: dict) -> tuple[float, str]:
        """The lambda that our errors choose, and the largest relative difference from the authors' scores."""

        def errors() -> np.ndarray:
            return np.array(self.sweep.alignment_errors(plans, *MEASURED_ON, label=None))

        ours, theirs = errors(), np.array(figures["scores"])
        with patch.object(SquaredNorms, "update", authors.rounded_update):
            rounded = errors()
        differences = [np.abs(scores / theirs - 1).max() for scores in (ours, rounded)]
        return figures["lambdas"][int(ours.argmin())], "{:.0e} / {:.0e}".format(*differences)

    def pruned(self, plan: SparsityPlan) -> list[float]:
        with inference(self.model):
            masks = FinalPruning(self.sweep.engine, plan).find()[0]
            apply_changes(self.decoder, masks)
        return perplexities(self.model)

    def block_step(self):
        steps = self.figures["neuroal_both"]["block"]
        targets = [authors.authors_block_targets(self.sparsity, lam, 8) for lam in steps["lambdas"]]
        chosen = targets[int(np.argmin(steps["scores"]))]
        with inference(self.model):
            plans = [authors.authors_block_plan(self.decoder, target) for target in targets]
            return chosen, self.scores(plans, steps)

    def row_step(self, targets):
        steps = self.figures["neuroal_both"]["row"]
        with inference(self.model):
            plan = authors.authors_block_plan(self.decoder, targets)
            with patch.object(SquaredNorms, "update", authors.rounded_update):
                places = self.sweep.deviation(plan, *MEASURED_ON, label=None).places
            alignment = {place.removeprefix("model.layers."): values.numpy() for place, values in places.items()}
            rows = [authors.authors_row_sparsity(self.decoder, targets, lam, alignment) for lam in steps["lambdas"]]
            plans = [authors.authors_row_plan(self.decoder, row) for row in rows]
            return plans[int(np.argmin(steps["scores"]))], self.scores(plans, steps)


def measure(saliency: str, sparsity: float, figures: dict) -> list[str]:
    lines = []

    def add(label, topup, ours, chosen="", scores="-"):
        theirs = [figures[topup]["ppl"][test] for test in authors.TESTS]
        step = {"neuroal_block": "block", "neuroal_both": "row"}.get(topup)
        their = f"{min(zip(figures[topup][step]['scores'], figures[topup][step]['lambdas']))[1]:g}" if step else "-"
        largest = max(abs(a / b - 1) for a, b in zip(ours, theirs))
        cells = (f"{sparsity:.0%}", saliency, label, f"{geometric_mean(ours):.2f}", f"{geometric_mean(theirs):.2f}")
        lines.append("| " + " | ".join((*cells, f"{largest:.2%}", f"{chosen or '-'} / {their}", scores)) + " |")
        print(lines[-1], flush=True)

    uniform = Setting(saliency, sparsity, figures)
    add("uniform", "uniform", uniform.pruned(authors.authors_block_plan(uniform.decoder, [sparsity] * 8)))
    block = Setting(saliency, sparsity, figures)
    targets, (chosen, worst) = block.block_step()
    row_plan, (row_chosen, row_worst) = block.row_step(targets)
    ours = block.pruned(authors.authors_block_plan(block.decoder, targets))
    add("block", "neuroal_block", ours, f"{chosen:g}", worst)
    both = Setting(saliency, sparsity, figures)
    add("block and row", "neuroal_both", both.pruned(row_plan), f"{row_chosen:g}", row_worst)
    return lines


def measure_product(saliency: str, sparsity: float) -> str:
    cells = [f"{sparsity:.0%}", saliency]
    for steps in ("block", "both"):
        model = authors.load_model()
        pruner = NeuronALPruner(
            NeuronALConfig(sparsity, saliency, topup="neuronal", topup_args={"steps": steps}, dataset=None)
        )
        pruner.prune(model, authors.load_ids("calibration_ids"))
        lambdas = [lam for lam in (pruner.report.block_lambda, pruner.report.row_lambda) if lam is not None]
        cells += [f"{geometric_mean(perplexities(model)):.2f}", " / ".join(f"{lam:g}" for lam in lambdas)]
    print("| " + " | ".join(cells) + " |", flush=True)
    return "| " + " | ".join(cells) + " |"


def main():
    logging.disable_progress_bar()
    runs = {key: value for key, value in authors.load_figures()["runs"].items() if not key.startswith("sparsegpt")}
    settings = sorted((float(key.split("|")[1]), key.split("|")[0]) for key in runs)
    text = [
        "# The authors' figures and ours",
        "",
        "This page compares the authors' code with this package. `python -m benchmarks.authors` wrote it.",
        "tests/fixtures/README.md describes the reference model (2.75 million parameters) and the run of the authors' code.",
        "",
        "Perplexities are geometric means over three test sets (dense: 16.52). *Largest difference* is the largest of the",
        "three. *Lambda* is ours / theirs. *Scores* has the largest relative difference of any lambda's alignment error from",
        "the authors', for our code / for our code with norms rounded as the authors round them. That rounding decides a few",
        "weights whose saliencies are closer than float32 resolves (tests/authors.py).",
        "",
        "## With the authors' plans",
        "",
        "| sparsity | saliency | plan | ours | theirs | largest difference | lambda | scores |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for sparsity, saliency in settings:
        text += measure(saliency, sparsity, runs[f"{saliency}|{sparsity:g}"])
    text += [
        "",
        "## What the package itself reaches, with its defaults",
        "",
        "The columns of the steps have perplexities. `alignment_scope` is `sequence`, and every row of every projection",
        "takes part in the row step.",
        "",
        "| sparsity | saliency | block step | lambda | both steps | lambdas |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    text += [measure_product(saliency, sparsity) for sparsity, saliency in settings]
    Path(__file__).with_suffix(".md").write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    main()
