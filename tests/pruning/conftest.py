"""Small prunes, and models without their weights to plan them for."""

import dataclasses

from optimum_neuronal import NeuronALConfig
from optimum_neuronal.topup.neuronal import NeuronAL


SMALL = {"topup": "neuronal", "num_samples": 6, "num_alignment_samples": 2, "seq_length": 16, "min_expert_tokens": 1}
LAMBDAS = {"block_lambdas": (0.05, 0.1, 0.15), "row_lambdas": (0.0, 0.1, 0.2)}


def saved(tmp_path, model):
    """The directory of a saved model, without its weights."""
    model.save_pretrained(tmp_path / "dense")
    weights = tmp_path / "dense" / "model.safetensors"
    size = weights.stat().st_size
    header = 8 + int.from_bytes(weights.read_bytes()[:8], "little")
    weights.unlink()
    return tmp_path / "dense", size - header


def config_of(**fields) -> NeuronALConfig:
    """A small prune, by NeuronAL if nothing else is said."""
    own = {entry.name: fields.pop(entry.name) for entry in dataclasses.fields(NeuronAL) if entry.name in fields}
    if fields.get("topup", "neuronal") == "neuronal":
        fields["topup_args"] = {**LAMBDAS, **own}
    return NeuronALConfig(**{"sparsity": 0.7, "saliency": "wanda", **SMALL, **fields})
