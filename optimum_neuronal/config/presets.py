"""Presets: fields of a `NeuronALConfig` by name."""

from collections.abc import Mapping
from typing import Any

from ..common.registry import Registry, parse_method
from ..saliency import SALIENCIES
from ..topup import TOPUPS


REGISTRIES: dict[str, Registry] = {"saliency": SALIENCIES, "topup": TOPUPS}
AUTHORS = "authors"  # variant of methods, as in the code behind the paper's tables
PAPER = "paper"
PRESETS: dict[str, dict[str, Any]] = {
    # NeuronAL as its authors ran it for the paper's tables.
    PAPER: {
        "saliency": "wanda",
        "topup": "neuronal",
        "topup_args": {"variant": AUTHORS},
        "sampling": AUTHORS,
        "dataset": "c4",
        "num_samples": 128,
        "num_alignment_samples": 8,
        "add_bos": False,  # not even before a Gemma's windows
    },
    # The same sparsity everywhere, with updated weights.
    "fast": {"saliency": "alps", "topup": "uniform"},
    # The refit gains the most, and NeuronAL adds nothing to it.
    "best": {"saliency": "alps", "topup": "uniform", "refit_epochs": 6},
    "two-four": {"sparsity": 0.5, "pattern": "2:4", "saliency": "alps", "topup": "uniform"},
}


def authors_variant(kind: str, method: str) -> dict[str, Any]:
    """Return the hyperparameter that selects a method's variant for the paper's tables, or none without one."""
    return {"variant": AUTHORS} if AUTHORS in REGISTRIES[kind].variants(method) else {}


def replace_fields(fields: Mapping[str, Any], given: Mapping[str, Any], preset: str | None = None) -> dict[str, Any]:
    """Return fields, of a preset or not, with the given ones added or replaced.

    A given method's text may hold hyperparameters: `"owl:half_width=0.1"`. They are merged into those of a method that stays.
    Another method starts from what the preset has for it: under `"paper"`, its variant `"authors"` if there is one.
    """
    replaced = {**fields, **given}
    for kind in REGISTRIES:
        args, in_text = f"{kind}_args", {}
        if isinstance(given.get(kind), str):
            replaced[kind], in_text = parse_method(given[kind])
        if replaced.get(kind) == fields.get(kind):
            known = fields.get(args, {})
        else:
            known = authors_variant(kind, replaced[kind]) if preset == PAPER and replaced[kind] else {}
        if (kind in given or args in given) and isinstance(given.get(args, {}), Mapping):
            replaced[args] = {**known, **given.get(args, {}), **in_text}
    return replaced
