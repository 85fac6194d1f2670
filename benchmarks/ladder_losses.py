"""Measure what methods lose on each rung of the ladder, print a table of it, and draw docs/figures/ladder.svg.

    python -m benchmarks.ladder_losses measure --models RUNG ... [--variants NAME ...] [--sparsities 0.7 ...] [--bits 2.4 ...]
    python -m benchmarks.ladder_losses show      tables and figure; nothing is measured

A RUNG is a directory that `benchmarks.ladder export` wrote. Every prune appends a line to benchmarks/rungs/losses.jsonl, and
those that the file has are skipped, so that an interrupted run goes on. Excess is `ln(perplexity / dense perplexity)`, the
mean over held-out English, other languages and code. All use 128 calibration sequences of 256 tokens. Rivals of quantised
weights are those of `benchmarks.few_bits`. docs/ladder.md has what this measured.
"""

import argparse
import copy
import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean

import torch
from transformers.utils import logging

from benchmarks.efforts import log_perplexities
from benchmarks.few_bits import quantise_as
from benchmarks.figures import EXCESS, FOLDER
from benchmarks.methods import load
from optimum_neuronal import NeuronALConfig, NeuronALPruner
from optimum_neuronal.common.display import format_markdown
from optimum_neuronal.common.figure_style import add_legend, make_styles, new_figure
from optimum_neuronal.topup.quantising import Rates


RESULTS = Path(__file__).parent / "rungs" / "losses.jsonl"
SALIENCIES = {"Wanda": "wanda", "SparseGPT": "sparsegpt", "ALPS": "alps"}
TOPUPS = {"uniform": "uniform", "OWL": "owl", "NeuronAL": "neuronal", "search": "search"}
ALL, HEADS = {"rotate": True}, {"rotate": True, "rotate_args": {"untie": False}}
OF_ALPS = {
    "uniform, block's own targets": {"topup": "uniform", "reconstruct": "block"},
    "uniform, refit": {"topup": "uniform", "refit_epochs": 6},
    "uniform, rotated": {"topup": "uniform", **ALL},
    "uniform, heads rotated": {"topup": "uniform", **HEADS},
    "search, rotated": ALL,
    "search, heads rotated": HEADS,
    "search, refit": {"refit_epochs": 6},
    "search, refit, heads rotated": {"refit_epochs": 6, **HEADS},
    "search, refit, rotated": {"refit_epochs": 6, **ALL},
}
# Name of a row -> fields of its config. ALPS fits the dense model's outputs, SparseGPT the block's own, unless a row says so.
# The heads are tied to the embeddings. So "ALPS, search, heads rotated" is the default, and with a refit it is effort="best".
VARIANTS = {
    **{f"{s}, {t}": {"saliency": SALIENCIES[s], "topup": TOPUPS[t]} for s in SALIENCIES for t in TOPUPS},
    "SparseGPT, NeuronAL": {"saliency": "sparsegpt", "topup": "neuronal", "topup_args": {"steps": "block"}},
    "SparseGPT, uniform, dense targets": {"saliency": "sparsegpt", "topup": "uniform", "reconstruct": "dense"},
    **{f"ALPS, {name}": {"saliency": "alps", **fields} for name, fields in OF_ALPS.items()},
}
DENSE = "dense"
SPARSITIES = (0.7, 0.6, 0.5, 0.8)
# Rows of `benchmarks.few_bits`: this package, some of them at the bits of llama.cpp's types (`benchmarks.llama_cpp_loss`), trellis
# codes and GPTQ with its rates, GPTQ with groups of 64 alone.
BITS = ("2.15", "2.33", "2.4", "2.93", "3", "3.86", "4", "4.5")
BITS += ("2.15+trellis", "2.4+trellis", "3+trellis", "4+trellis")
BITS += ("2.7+gptq", "3+gptq", "4+gptq", "int2", "int3", "int4")
DRAWN = (
    "Wanda, uniform",
    "SparseGPT, uniform",
    "ALPS, uniform",
    "Wanda, search",
    "ALPS, search",
    "ALPS, uniform, rotated",
)


@contextmanager
def divergences_measured_once() -> Iterator[None]:
    """Within the block, which is for one model, all budgets of bits use the trials of the first."""
    measure, found = Rates._divergences, {}

    def remembered(self: Rates, sweep) -> dict[str, float]:
        return found or found.update(measure(self, sweep)) or found

    Rates._divergences = remembered
    try:
        yield
    finally:
        Rates._divergences = measure


def prune_as(variant: str, sparsity: float, model, ids: torch.Tensor) -> None:
    """Prune a dense model in place."""
    NeuronALPruner(NeuronALConfig(sparsity, dataset=None, num_samples=len(ids), **VARIANTS[variant])).prune(model, ids)


def measure(folder: Path, variants: list[str], sparsities: list[float], bits: list[str], output: Path) -> None:
    """Append what is missing of one rung."""
    dense, ids, tests = load(str(folder))
    ids, before = torch.as_tensor(ids), log_perplexities(dense, tests)
    tasks = [{"variant": variant, "sparsity": sparsity} for sparsity in sparsities for variant in variants]
    tasks += [{"variant": row} for row in bits]
    rung = {"rung": int(folder.name)}
    if not any(line["variant"] == DENSE and rung.items() <= line.items() for line in lines(output)):
        perplexity = {name: round(math.exp(value), 2) for name, value in zip(tests, before)}
        _append(output, rung | {"variant": DENSE, "perplexity": perplexity})
    with divergences_measured_once():
        for task in (rung | task for task in tasks):
            if any(task.items() <= line.items() for line in lines(output)):
                continue
            start, model = time.perf_counter(), copy.deepcopy(dense)
            if "sparsity" in task:
                prune_as(task["variant"], task["sparsity"], model, ids)
            else:
                task["bits"] = round(quantise_as(task["variant"], model, ids), 2)
            seconds = round(time.perf_counter() - start)
            excess = [after - own for after, own in zip(log_perplexities(model, tests), before)]
            found = {name: round(value, 4) for name, value in zip(tests, excess)}
            _append(output, task | {"excess": found, "seconds": seconds})


def _append(output: Path, line: dict) -> None:
    with output.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def lines(path: Path) -> list[dict]:
    """Return what was measured."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def tables(found: list[dict]) -> Iterator[str]:
    """Yield tables in Markdown: of the dense models, for each sparsity, and of quantised weights; a column for each rung."""
    rungs = sorted({line["rung"] for line in found})
    header = [f"{rung} per parameter" for rung in rungs]
    dense = {line["rung"]: line["perplexity"] for line in found if line["variant"] == DENSE}
    kinds = next(iter(dense.values()), {})
    yield format_markdown(
        ["dense perplexity", *header],
        [[kind, *(f"{dense[rung][kind]:.2f}" if rung in dense else "-" for rung in rungs)] for kind in kinds],
    )
    for sparsity in (*sorted(SPARSITIES), None):
        own = [line for line in found if line.get("sparsity") == sparsity and "excess" in line]
        excess = {(line["variant"], line["rung"]): mean(line["excess"].values()) for line in own}
        bits = {line["variant"]: line.get("bits") for line in own}
        names = [name for name in (*VARIANTS, *BITS) if name in bits]
        cells = [
            [f"{_method(name)}, {bits[name]:.2f} bits per weight" if bits[name] else name]
            + [f"{excess[name, rung]:.3f}" if (name, rung) in excess else "-" for rung in rungs]
            for name in names
        ]
        yield format_markdown(["quantised" if sparsity is None else f"{sparsity:.0%} zeros", *header], cells)


def _method(row: str) -> str:
    """Return the name of the method of a row of `benchmarks.few_bits`."""
    if row.startswith("int"):
        return "GPTQ, groups of 64"
    rival = row.partition("+")[2]
    return {"": "this package", "gptq": "GPTQ, rates of this package"}.get(
        rival, "trellis codes, rates of this package"
    )


def draw(found: list[dict]) -> None:
    """Draw excess at 70 % against training tokens per parameter."""
    styles = make_styles(DRAWN)
    with new_figure(4.2, "Excess at 70 % zeros up the ladder: one Llama of 3.2 M parameters") as (figure, files):
        axes, drawn = figure.subplots(), []
        for name in DRAWN:
            own = [line for line in found if line["variant"] == name and line.get("sparsity") == 0.7]
            points = sorted((line["rung"], mean(line["excess"].values())) for line in own)
            drawn += axes.plot(*zip(*points), label=name, **styles[name])
        ticks = sorted({line["rung"] for line in found})
        axes.set(xscale="log", yscale="log", xlabel="training tokens per parameter", ylabel=EXCESS)
        axes.set_xticks(ticks, [str(tick) for tick in ticks], minor=False)
        axes.set_xticks([], minor=True)
        add_legend(figure, drawn)
    (FOLDER / "ladder.svg").write_bytes(files[".svg"])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("measure")
    command.add_argument("--models", nargs="+", type=Path, required=True, help="folders named by their rungs: .../10")
    command.add_argument("--variants", nargs="*", default=list(VARIANTS), choices=VARIANTS, help="(default: all)")
    command.add_argument("--sparsities", nargs="*", type=float, default=SPARSITIES, help="(default: %(default)s)")
    command.add_argument("--bits", nargs="*", default=BITS, help="rows of benchmarks.few_bits (default: %(default)s)")
    command.add_argument("--output", type=Path, default=RESULTS, help="(default: benchmarks/rungs/losses.jsonl)")
    commands.add_parser("show")
    args = parser.parse_args()
    logging.disable_progress_bar()
    if args.command == "measure":
        for folder in args.models:
            measure(folder, args.variants, args.sparsities, args.bits, args.output)
    else:
        found = lines(RESULTS)
        print("\n\n".join(tables(found)))
        draw(found)


if __name__ == "__main__":
    main()
