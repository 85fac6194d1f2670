"""Draw the measured figures of docs/concepts.md: alignment by lambda, and sparsity by block and kind of projections.

    python -m benchmarks.concept_figures [--lambdas 0.05 0.1 0.2]    # writes docs/figures/*.svg, in some minutes

Both are of the demo's model at 70 % with Wanda: NeuronAL's block step alone, whose alignment error is beside the perplexity
of held-out text that each lambda would have had; and the search.
"""

import argparse
import copy
import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from transformers.utils import logging

from benchmarks.efforts import log_perplexities
from benchmarks.figures import FOLDER
from benchmarks.methods import load
from optimum_neuronal import NeuronALConfig, NeuronALPruner
from optimum_neuronal.common.figure_style import COLOURS, add_legend, new_figure, show_percent, show_round_numbers
from optimum_neuronal.topup.neuronal import LAMBDAS


SPARSITY = 0.7
ALIGNMENT, KINDS = "alignment-by-lambda", "sparsity-by-block-and-kind"


def pruned(model, ids: torch.Tensor, **fields):
    """A pruned copy and its report."""
    model = copy.deepcopy(model)
    pruner = NeuronALPruner(NeuronALConfig(SPARSITY, saliency="wanda", dataset=None, num_samples=len(ids), **fields))
    pruner.prune(model, ids)
    return model, pruner.report


def by_lambda(model, ids: torch.Tensor, tests, lambdas: Sequence[float]) -> tuple[list[float], list[float], float]:
    """Alignment errors and perplexities of lambdas of the block step, and the lambda that NeuronAL chooses."""
    errors, perplexities = [], []
    for width in lambdas:
        found, report = pruned(model, ids, topup="neuronal", topup_args={"steps": "block", "block_lambdas": [width]})
        errors.append(report.decisions["block"]["candidates"][0]["error"])
        perplexities.append(math.exp(log_perplexities(found, tests)[0]))
    return errors, perplexities, lambdas[errors.index(min(errors))]


def draw_alignment(lambdas: Sequence[float], errors: Sequence[float], perplexities, chosen: float) -> bytes:
    """Two panels above each other: error and perplexity by lambda, what NeuronAL chose marked."""
    with new_figure(5.6, "NeuronAL's block step, demo model, Wanda, 70 %") as (figure, files):
        panels = figure.subplots(2, sharex=True)
        for axes, values, label, colour in zip(
            panels, (errors, perplexities), ("alignment error", "perplexity, held-out text"), COLOURS
        ):
            axes.plot(lambdas, values, "o-", color=colour, ms=5, label=label)
            axes.axvline(
                chosen, color="black", lw=1, ls="--", label=f"chosen: {chosen:g}" if axes is panels[0] else None
            )
            axes.set(ylabel=label)
            show_round_numbers(axes.yaxis)
        panels[-1].set_xlabel("lambda: half-width of the sparsity window over the blocks")
        add_legend(figure, [line for axes in panels for line in axes.lines if not line.get_label().startswith("_")])
    return files[".svg"]


def draw_kinds(sparsities: Mapping[str, float]) -> bytes:
    """A cell for every block and kind of projections."""
    split = {name: (int(name.split(".layers.")[1].split(".")[0]), name.rpartition(".")[2]) for name in sparsities}
    kinds = list(dict.fromkeys(kind for _, kind in split.values()))
    cells = np.full((len(kinds), 1 + max(block for block, _ in split.values())), np.nan)
    for name, (block, kind) in split.items():
        cells[kinds.index(kind), block] = sparsities[name]
    with new_figure(3.6, "Where the search puts the zeros: demo model, Wanda, 70 %") as (figure, files):
        axes = figure.subplots()
        axes.grid(False)
        image = axes.imshow(cells, cmap="viridis", aspect="auto")
        axes.set(xlabel="Decoder block", xticks=range(cells.shape[1]))
        axes.set_yticks(range(len(kinds)), kinds)
        bar = figure.colorbar(image, ax=axes, pad=0.02, label="Sparsity")
        show_round_numbers(bar.ax.yaxis)
        show_percent(bar.ax.yaxis)
    return files[".svg"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lambdas", nargs="+", type=float, default=LAMBDAS, help="(default: NeuronAL's)")
    args = parser.parse_args()
    logging.disable_progress_bar()
    model, ids, tests = load("demo")
    ids = torch.as_tensor(ids).long()
    alignment = draw_alignment(args.lambdas, *by_lambda(model, ids, tests, args.lambdas))
    (FOLDER / f"{ALIGNMENT}.svg").write_bytes(alignment)
    _, report = pruned(model, ids, topup="search")
    kinds = draw_kinds({name: found["sparsity"] for name, found in report.projections.items()})
    (FOLDER / f"{KINDS}.svg").write_bytes(kinds)


if __name__ == "__main__":
    main()
