"""Measure what rotate=True gains, on the trained models of this repository, and what it costs.

    python -m benchmarks.rotation --output FILE [--tables NAME ...] [--seeds 0 1] [--models NAME ...]
    python -m benchmarks.rotation --output FILE --models benchmarks/rungs/16 --calibration TEXT --heldout TEXT

Every prune appends a line of JSON to FILE; those that FILE already has are skipped, so that it goes on after an
interruption. At the end a table of the excess is printed: ln(perplexity / dense perplexity), mean over the test sets and
the seeds. "reference" and "demo" are tested as by benchmarks/methods.py, directories on the text of --heldout.
"""

import argparse
import copy
import json
import math
import statistics
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from benchmarks import methods
from optimum_neuronal import NeuronALConfig, NeuronALPruner, evaluate_perplexity
from optimum_neuronal.common.display import format_markdown
from optimum_neuronal.data.calibration import draw_windows, take_sequences
from optimum_neuronal.demo.run import SEQ_LENGTH, TEST_WINDOWS
from optimum_neuronal.evaluation.perplexity import load_windows
from optimum_neuronal.pruning.context import check
from optimum_neuronal.pruning.rotate import rotated


UNIFORM = {"saliency": "alps", "topup": "uniform"}
SPARSITIES = (0.5, 0.6, 0.7, 0.8)
FORM = {"sparsity": 0.5, "pattern": "2:4", "topup": "uniform"}
# Name of a table -> fields of the config of its rows; each is measured without and with a rotation.
TABLES = {
    "uniform": [{"sparsity": sparsity, **UNIFORM} for sparsity in SPARSITIES],
    "search": [{"sparsity": sparsity, "rotate": False} for sparsity in SPARSITIES[1:]],
    "best": [{"sparsity": sparsity, "effort": "best", "rotate": False} for sparsity in SPARSITIES[1:]],
    "saliencies": [{"sparsity": 0.7, "saliency": name, "topup": "uniform"} for name in ("sparsegpt", "wanda")],
    "2:4": [{**FORM, "saliency": name} for name in ("alps", "sparsegpt")],
    "bf16": [{"dtype": "bfloat16"}],  # nothing is pruned
}
CHOICES = ({}, {"untie": False})  # of rotate_args; the second only where head and embeddings share their weights


def load(name: str, texts: list[Path | None]):
    """Return model, calibration ids and test sets of "demo", "reference", or a directory with its two texts."""
    if name in methods.OWN_MODELS:
        return methods.load(name)
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    tokenizer, (calibration, heldout) = AutoTokenizer.from_pretrained(name), map(str, texts)
    shape = {"num_samples": 128, "seq_length": SEQ_LENGTH, "seed": 0, "vocab_size": len(tokenizer)}
    ids = draw_windows(calibration, tokenizer, **shape).ids
    return model, ids, {"heldout": load_windows(model.config, tokenizer, heldout, SEQ_LENGTH, TEST_WINDOWS)}


def log_perplexity(model, tests: dict) -> float:
    """Return the mean of the logarithms over the test sets."""
    return statistics.mean(math.log(evaluate_perplexity(model, None, ids, batch_size=8)) for ids in tests.values())


def measure(model, ids: torch.Tensor, tests: dict, dense: float, fields: dict) -> dict:
    """Prune a copy of the model, and return the excess and what it took."""
    config = NeuronALConfig(**fields, num_samples=len(ids), num_alignment_samples=8, seq_length=ids.shape[1])
    pruner = NeuronALPruner(config)
    pruned = pruner.prune(copy.deepcopy(model), dataset=ids)
    seconds = {name: round(value, 1) for name, value in pruner.report.seconds.items()}
    found = {"excess": log_perplexity(pruned, tests) - dense, "seconds": seconds, "rotation": pruner.report.rotation}
    return {**found, "parameters": pruned.num_parameters()}


def measure_rounding(model, ids: torch.Tensor, tests: dict, dense: float, fields: dict) -> dict:
    """Rotate a copy of the model in another dtype, if the fields say so, prune nothing, and return its excess."""
    fields = {**fields, "sparsity": 0.7}
    model = copy.deepcopy(model).to(getattr(torch, fields.pop("dtype")))
    shape = {"num_samples": len(ids), "num_alignment_samples": 8, "seq_length": ids.shape[1]}
    calibration = take_sequences(ids, len(ids), model.config.vocab_size)
    context = replace(check(model, NeuronALConfig(**fields, **shape)), calibration=calibration)
    with rotated(context) as rotation:
        excess = log_perplexity(model, tests) - dense
    seconds = {name: round(value, 1) for name, value in context.clock.seconds.items()}
    return {"excess": excess, "seconds": seconds, "rotation": rotation, "parameters": model.num_parameters()}


def table(lines: list[dict]) -> str:
    """Return a Markdown table: a row for every model and prune, a column for every kind of rotation."""
    rows: dict[tuple, dict[str, list]] = {}
    for line in lines:
        fields = {key: value for key, value in line["fields"].items() if key not in ("rotate", "rotate_args", "seed")}
        kind = json.dumps(line["fields"].get("rotate_args", {})) if line["fields"].get("rotate") else "without"
        row = rows.setdefault((line["model"], ", ".join(f"{key} {value}" for key, value in fields.items())), {})
        row.setdefault(kind, []).append(line)
    kinds = list(dict.fromkeys(kind for row in rows.values() for kind in row))
    cells = [[*key, *(cell(row.get(kind)) for kind in kinds)] for key, row in rows.items()]
    return format_markdown(["model", "prune", *kinds], cells)


def cell(lines: list[dict] | None) -> str:
    """Return the mean excess, the number of prunes, and the seconds of learning and of the final pruning."""
    if not lines:
        return "-"
    learning, pruning = (statistics.mean(x["seconds"].get(part, 0) for x in lines) for part in ("rotation", "pruning"))
    return f"{statistics.mean(x['excess'] for x in lines):.4f} ({len(lines)}; {learning:.0f} + {pruning:.0f} s)"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="file of results, which is appended to")
    parser.add_argument("--tables", nargs="+", default=list(TABLES), choices=TABLES, help="(default: all)")
    parser.add_argument("--models", nargs="+", default=["reference"], help="reference, demo, or directories")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1], help="of the rotations (default: 0 1)")
    parser.add_argument("--calibration", type=Path, help="text for a directory")
    parser.add_argument("--heldout", type=Path, help="text for a directory")
    args = parser.parse_args()
    logging.disable_progress_bar()
    lines = [json.loads(line) for line in args.output.read_text().splitlines()] if args.output.exists() else []
    for name in args.models:
        model, ids, tests = load(name, [args.calibration, args.heldout])
        dense, tied = log_perplexity(model, tests), model.config.tie_word_embeddings
        turned = [
            {"rotate": True, "rotate_args": choice, "seed": s} for choice in CHOICES[: 1 + tied] for s in args.seeds
        ]
        for fields in [f | own for key in args.tables for f in TABLES[key] for own in ({}, *turned)]:
            if any(line["model"] == name and line["fields"] == fields for line in lines):
                continue
            found = (measure_rounding if "dtype" in fields else measure)(model, ids, tests, dense, fields)
            lines.append({"model": name, "fields": fields, **found})
            with args.output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(lines[-1]) + "\n")
    print(table(lines))


if __name__ == "__main__":
    main()
