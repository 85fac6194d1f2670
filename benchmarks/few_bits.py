"""Measure bits per weight and excess of sparse quantised weights, beside GPTQ, on trained models.

    python -m benchmarks.few_bits [--models reference demo DIR ...] [--rows 60+3 60+3+refit int2 ...] [--first 40]

A row is SPARSITY+BITS; with "+nearest" the values are rounded after the prune, with "+refit" they are refitted as with
effort="best"; int2, int3 and int4 are GPTQ, dense, asymmetric, groups of 64 with 32 bits of scale and offset, damping
0.01, columns of large inputs first ("+inorder": as they stand), toward the dense model as the sparse rows are ("+block":
toward the block's own output, as GPTQ is published).
Bits a weight count masks, codes, scales and padding. "calibration KL" is of sequences that nothing was fitted to; excess is
`ln(perplexity / dense perplexity)`, mean over the test sets. Models and texts are those of `benchmarks.methods`. Where the
sparsity goes is searched once for every sparsity, on the first sequences, and kept in the directory of --plans.
docs/few_bits.md has what this measured.
"""

import argparse
import copy
import json
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers.utils import logging

from benchmarks.efforts import log_perplexities
from benchmarks.gptq import GPTQ
from benchmarks.methods import load
from optimum_neuronal import NeuronALConfig, NeuronALPruner
from optimum_neuronal.display import format_table
from optimum_neuronal.efforts import EFFORTS
from optimum_neuronal.formats.coded import CodedWeight
from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.sparsity.plan import SparsityPlan
from optimum_neuronal.topup.base import Allocation, register_topup
from optimum_neuronal.topup.search import Search


DENSE = ("int4", "int3", "int2")
SPARSE = ("40+3", "50+4", "50+3", "60+4", "60+3", "70+4", "70+3", "50+2", "60+2", "70+2")
ROWS = (*DENSE, *SPARSE, "60+3+nearest", "60+2+nearest", "40+3+refit", "60+3+refit", "60+2+refit")
HELD_OUT = 8  # calibration sequences, the last, that nothing is fitted to


@register_topup("kept-search")
@dataclass(frozen=True)
class KeptSearch(Search):
    """The search, whose plan is kept in a file.

    Args:
        path (`str`): of the file.
    """

    path: str = ""

    def allocate(self, sweep, sparsity):
        path = Path(self.path)
        if not path.exists():
            found = super().allocate(sweep, sparsity).plan.sparsity
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({name: float(value) for name, value in found.items()}, indent=1))
        return Allocation(SparsityPlan(json.loads(path.read_text())))


def prune_as(row: str, model, ids: torch.Tensor, plans: Path) -> float:
    """Makes of a dense model, in place, what a row says; returns bits a weight."""
    if row.startswith("int"):
        name, *how = row.split("+")
        saliency_args = {"bits": int(name.removeprefix("int")), "ordered": "inorder" not in how}
        reconstruct = "block" if "block" in how else "dense"
        fields = {"saliency": "gptq", "saliency_args": saliency_args, "topup": "uniform", "reconstruct": reconstruct}
        NeuronALPruner(NeuronALConfig(0.0, dataset=None, num_samples=len(ids), **fields)).prune(model, ids)
        return GPTQ(**saliency_args).bits_per_weight
    percent, bits, *how = row.split("+")
    fields = {"topup": "kept-search", "topup_args": {"path": str(plans / f"{percent}.json")}}
    if "refit" in how:
        fields["refit_epochs"] = EFFORTS["best"]["refit_epochs"]
    value_bits = None if "nearest" in how else int(bits)
    config = NeuronALConfig(int(percent) / 100, dataset=None, num_samples=len(ids), value_bits=value_bits, **fields)
    NeuronALPruner(config).prune(model, ids)
    projections = list(find_decoder(model).projections.values())
    taken = 0
    for projection in projections:
        coded = CodedWeight.rounded(projection.weight, int(bits))
        projection.weight.copy_(coded.unpack())
        taken += 8 * coded.nbytes
    return taken / sum(p.weight.numel() for p in projections)


@torch.no_grad()
def divergence(dense, model, ids: torch.Tensor) -> float:
    """Mean KL divergence of the next-token distributions from the dense model's, nats a token."""
    total = 0.0
    for sequence in ids.split(1):
        expected, found = (m(sequence).logits.log_softmax(-1) for m in (dense, model))
        total += float((expected.exp() * (expected - found)).sum(-1).mean())
    return total / len(ids)


def losses(
    dense, model, before: list[float], tests: dict[str, torch.Tensor], heldout: torch.Tensor
) -> tuple[float, float]:
    """Excess and "calibration KL" of a model, `before` being the dense model's logarithms of perplexity."""
    excess = [after - own for after, own in zip(log_perplexities(model, tests), before)]
    return sum(excess) / len(excess), divergence(dense, model, heldout)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["reference", "demo"], help="(default: reference demo)")
    parser.add_argument("--rows", nargs="+", default=ROWS, help=f"(default: {' '.join(ROWS)})")
    parser.add_argument("--first", type=int, default=0, help="calibration sequence to begin with (default: 0)")
    parser.add_argument("--plans", type=Path, default=Path("few_bits"), help="kept plans (default: few_bits)")
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
            bits = prune_as(row, model, ids, args.plans / f"{Path(name).name}-{args.first}")
            seconds = time.perf_counter() - start
            figures = losses(dense, model, before, tests, heldout)
            rows.append([row, f"{bits:.2f}", *(f"{figure:.4f}" for figure in figures), f"{seconds:.0f}"])
            print(" | ".join(rows[-1]), flush=True)
        print(f"\n{name}\n\n{format_table(header, rows)}", flush=True)


if __name__ == "__main__":
    main()
