"""A comparison by the published protocol, and its page, in the form that `docs/evidence/` collects."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..common.display import Column, Table, format_markdown
from ..files.atomic import write_atomically
from ..packed.environment import describe_environment
from .comparison import Comparison
from .results import DENSE, PRESET, Result


PAGE = "evidence.md"
# Preset -> what flags that are not given are, as `compare` calls them: WikiText2 after calibration with 128 x 2048 tokens of
# C4, as in the papers of SparseGPT, Wanda, ALPS and NeuronAL.
PRESETS: dict[str, dict[str, Any]] = {
    "evidence": {
        "saliencies": ["wanda", "sparsegpt", "alps"],
        "topups": ["uniform", "owl", "search"],
        "sparsities": [0.5, 0.6, 0.7],
        "presets": ["best"],
        "bits_per_weight": [2.4, 3.0],
        "dataset": "c4",
        "evaluate": ["wikitext2"],
        "num_samples": 128,
        "seq_length": 2048,
    }
}


def evidence_page(comparison: Comparison) -> str:
    """Return a comparison as a page in Markdown: the model, the protocol, the machine, and a row for each combination.

    The first column names the model, so that rows of several pages can be put together.
    """
    shown = [comparison.dense, *comparison.results]
    columns = [
        Column("model", [comparison.model] * len(shown)),
        Column("asked for", [DENSE if r.saliency == DENSE else r.target for r in shown]),
        Column("method", [_method(r) for r in shown]),
        Column("bits per weight", [r.bits_per_weight for r in shown], "{:.2f}".format),
    ]
    for name, dense in comparison.dense.perplexity.items():
        perplexity = [r.perplexity.get(name) for r in shown]
        excess = [None if value is None else math.log(value / dense) for value in perplexity]
        columns += [
            Column(f"perplexity {name}", perplexity, "{:.2f}".format),
            Column("excess", excess, "{:.3f}".format, min),
        ]
    for name in comparison.dense.accuracy:
        accuracy = [r.accuracy[name]["accuracy"] if name in r.accuracy else None for r in shown]
        columns.append(Column(name, accuracy, "{:.2%}".format, max))
    columns.append(
        Column("seconds", [None if r.saliency == DENSE or r.error else r.seconds for r in shown], "{:.0f}".format)
    )
    table = Table.of(columns, [None, *((r.sparsity, r.budget) for r in comparison.results)])
    calibration, here = comparison.calibration, describe_environment()
    facts = [f"Machine: {here['processor']}; accelerator: {here['accelerator']}."]
    facts += ["Versions: " + ", ".join(f"{name} {version}" for name, version in comparison.versions.items()) + "."]
    if calibration:
        facts += ["Calibration: {num_samples} x {seq_length} tokens of {source}, seed {seed}.".format(**calibration)]
        facts += ["Perplexity: windows of as many tokens."]
    facts += [f"Failed: {r.method}: {r.error}" for r in comparison.failed]
    return "\n".join([f"# {comparison.model}", "", *(f"- {fact}" for fact in facts), "", format_markdown(*table), ""])


def write_page(comparison: Comparison, directory: str | Path) -> Path:
    """Write the page into the directory of a comparison that was saved, and return its path."""
    path = Path(directory) / PAGE
    write_atomically(path, evidence_page(comparison).encode())
    return path


def _method(result: Result) -> str | None:
    if result.saliency == DENSE:
        return None
    if result.saliency == PRESET:
        return ": ".join(filter(None, [result.label, _chosen(result.config)]))
    return result.saliency if result.budget is not None else f"{result.saliency}, {result.topup}"


def _chosen(config: Mapping[str, Any]) -> str:
    """Return what a preset chose: `"alps, search, rotated"`; nothing if the prune failed, which leaves the config empty."""
    if not config:
        return ""
    further = {"refit": config["refit_epochs"], "rotated": config["rotate"]}
    return ", ".join([config["saliency"], config["topup"], *(word for word, done in further.items() if done)])
