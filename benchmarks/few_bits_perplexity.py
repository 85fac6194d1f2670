"""Measure bits per weight and perplexity of the demo's model for the rows of `benchmarks.few_bits_speed`.

    python -m benchmarks.few_bits_perplexity [--topup search] [--output DIR]

70% is ALPS on the demo's model and texts; rows of bits are budgets that the package quantises under (finished rows are kept
in the output directory). In one row embeddings and head alone are rounded, to 8 bits. int8 and int4 are torchao's weight-only,
with as large groups as fit, if it is installed. Bits count masks, codes, scales and offsets of the projections.
docs/few_bits.md has what this measured.
"""

import argparse
import copy
import math

from transformers.utils import logging

from benchmarks.few_bits_speed import projections
from benchmarks.methods import load
from optimum_neuronal import sparsify
from optimum_neuronal.common.display import format_markdown
from optimum_neuronal.comparing.comparing import compare
from optimum_neuronal.evaluation.perplexity import evaluate_perplexity
from optimum_neuronal.evaluation.quantized import FORMS, footprint, has_torchao, quantize


BITS = 16  # of values that are not rounded: the model is pruned in float32, and would be computed with in bfloat16
SPARSITY = 0.7
BUDGETS = {"4 bits": 4.1, "3 bits": 3.1, "2 bits": 2.11}  # scales of rows take a tenth of a bit in so small a model


def quantized_row(dense, form: str, tests: dict) -> tuple[float, float]:
    """Bits a weight and perplexity with torchao's weights, in bfloat16; geometric mean over the test sets."""
    model = quantize(copy.deepcopy(dense).bfloat16(), projections(dense), form)
    layers = [model.get_submodule(name) for name in projections(model)]
    weights = sum(layer.in_features * layer.out_features for layer in layers)
    logs = [math.log(evaluate_perplexity(model, None, ids)) for ids in tests.values()]
    return 8 * sum(map(footprint, layers)) / weights, math.exp(sum(logs) / len(logs))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", default="few_bits_perplexity", help="(default: few_bits_perplexity)")
    parser.add_argument("--topup", default="search", help="where the sparsity goes (default: search)")
    args = parser.parse_args()
    logging.disable_progress_bar()
    model, ids, tests = load("demo")
    rows = []
    for form in FORMS if has_torchao() else ():
        rows.append((form, *quantized_row(model, form, tests)))
        print(rows[-1], flush=True)
    rounded = sparsify(copy.deepcopy(model), embedding_bits=8)
    perplexities = [evaluate_perplexity(rounded, None, test) for test in tests.values()]
    rows.append(("embeddings and head of 8 bits", BITS, *perplexities))
    print(rows[-1], flush=True)
    methods = {"saliencies": ["alps"], "topups": [args.topup], "sparsities": [SPARSITY]}
    data = {"dataset": ids, "evaluate": tests, "num_samples": len(ids), "output": args.output}
    found = compare(model, **methods, bits_per_weight=list(BUDGETS.values()), **data)
    for name, result in zip([f"{SPARSITY:.0%}", *BUDGETS], found.results):
        taken = 1 + BITS * (1 - result.achieved_sparsity) if result.budget is None else result.bits_per_weight
        rows.append((name, taken, *result.perplexity.values()))
        print(rows[-1], flush=True)
    rows.insert(0, ("dense", BITS, *found.dense.perplexity.values()))
    table = [[name, f"{bits:.2f}", f"{perplexity:.2f}"] for name, bits, perplexity in rows]
    print(f"\n{format_markdown(['demo model', 'bits a weight', 'perplexity'], table)}")


if __name__ == "__main__":
    main()
