"""Presets: fields of a `NeuronALConfig` by name."""

from typing import Any


PRESETS: dict[str, dict[str, Any]] = {
    # NeuronAL as its authors ran it for the tables of the paper.
    "paper": {
        "saliency": "wanda",
        "topup": "neuronal",
        "topup_args": {"variant": "authors"},
        "sampling": "authors",
        "dataset": "c4",
        "num_samples": 128,
        "num_alignment_samples": 8,
    },
    # The same sparsity everywhere, with updated weights.
    "fast": {"saliency": "alps", "topup": "uniform"},
    # The refit gains the most, and NeuronAL adds nothing to it.
    "best": {"saliency": "alps", "topup": "uniform", "refit_epochs": 6},
    "two-four": {"sparsity": 0.5, "pattern": "2:4", "saliency": "alps", "topup": "uniform"},
}
