"""Measure bits per weight and excess of quantised weights, beside GPTQ, on trained models.

    python -m benchmarks.few_bits [--models reference demo DIR ...] [--rows 2.4 3 3+uniform int2 ...] [--first 40]

A row is a budget of bits a weight; with "+uniform" all projections get as equal rates as it allows. int2, int3 and int4 are
GPTQ, asymmetric, groups of 64 with 32 bits of scale and offset, damping 0.01, columns of large inputs first ("+inorder": as
they stand), toward the dense model as the package does ("+block": toward the block's own output, as GPTQ is published).
"2.4+gptq" and "2.4+trellis" are the rivals of `benchmarks.rivals` at such a budget, with rates for each matrix.
"calibration KL" is of sequences that nothing was fitted to; excess is `ln(perplexity / dense perplexity)`, mean over the
test sets. Models and texts are those of `benchmarks.methods`. docs/few_bits.md has what this measured.
"""

import argparse
import copy
import time

import torch
from transformers.utils import logging

from benchmarks.efforts import log_perplexities
from benchmarks.gptq import GPTQ
from benchmarks.methods import load
from benchmarks.rivals import RIVALS, quantise_by
from optimum_neuronal import NeuronALConfig, NeuronALPruner
from optimum_neuronal.common.display import format_table


ROWS = ("int4", "int3", "int2", "4", "3.5", "3", "2.7", "2.4", "2.2", "3+uniform", "2.4+uniform")
HELD_OUT = 8  # calibration sequences, the last, that nothing is fitted to


def quantise_as(row: str, model, ids: torch.Tensor) -> float:
    """Quantise a dense model in place as a row says. Return bits a weight."""
    name, *how = row.split("+")
    data = {"dataset": None, "num_samples": len(ids)}
    if name.startswith("int"):
        saliency_args = {"bits": int(name.removeprefix("int")), "ordered": "inorder" not in how}
        reconstruct = "block" if "block" in how else "dense"
        fields = {"saliency": "gptq", "saliency_args": saliency_args, "topup": "uniform", "reconstruct": reconstruct}
        NeuronALPruner(NeuronALConfig(0.0, **fields, **data)).prune(model, ids)
        return GPTQ(**saliency_args).bits_per_weight
    if rival := next((word for word in how if word in RIVALS), None):
        return quantise_by(rival, float(name), model, ids)
    topup = "uniform" if "uniform" in how else None
    pruner = NeuronALPruner(NeuronALConfig(bits_per_weight=float(name), topup=topup, **data))
    pruner.prune(model, ids)
    return pruner.report.bits_per_weight


@torch.no_grad()
def divergence(dense, model, ids: torch.Tensor) -> float:
    """Return the mean KL divergence of the next-token distributions from the dense model's, nats a token."""
    total = 0.0
    for sequence in ids.split(1):
        expected, found = (m(sequence).logits.log_softmax(-1) for m in (dense, model))
        total += float((expected.exp() * (expected - found)).sum(-1).mean())
    return total / len(ids)


def losses(
    dense, model, before: list[float], tests: dict[str, torch.Tensor], heldout: torch.Tensor
) -> tuple[float, float]:
    """Return excess and "calibration KL" of a model, `before` being the dense model's logarithms of perplexity."""
    excess = [after - own for after, own in zip(log_perplexities(model, tests), before)]
    return sum(excess) / len(excess), divergence(dense, model, heldout)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["reference", "demo"], help="(default: reference demo)")
    parser.add_argument("--rows", nargs="+", default=ROWS, help=f"(default: {' '.join(ROWS)})")
    parser.add_argument("--first", type=int, default=0, help="calibration sequence to begin with (default: 0)")
    args = parser.parse_args()
    logging.disable_progress_bar()
    header = ["variant", "bits a weight", "excess", "calibration KL", "seconds"]
    for name in args.models:
        dense, ids, tests = load(name)
        ids = torch.as_tensor(ids).roll(-args.first, 0)
        ids, heldout = ids[:-HELD_OUT], ids[-HELD_OUT:].long()
        before, rows = log_perplexities(dense, tests), []
        for row in args.rows:
            start = time.perf_counter()
            model = copy.deepcopy(dense)
            bits = quantise_as(row, model, ids)
            seconds = time.perf_counter() - start
            figures = losses(dense, model, before, tests, heldout)
            rows.append([row, f"{bits:.2f}", *(f"{figure:.4f}" for figure in figures), f"{seconds:.0f}"])
            print(" | ".join(rows[-1]), flush=True)
        print(f"\n{name}\n\n{format_table(header, rows)}", flush=True)


if __name__ == "__main__":
    main()
