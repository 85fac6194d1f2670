"""Experiments: arguments of [`compare`] by name."""

from typing import Any

from ..common.registry import format_method, parse_method
from ..common.validation import check_choice, validate_strings
from ..config.presets import authors_variant
from ..topup.neuronal import LAMBDAS


UNIFORM, DSNOT, OWL, ALPHA, NEURONAL = (
    f"{name}:variant=authors" for name in ("uniform", "dsnot", "owl", "alpha_pruning", "neuronal")
)
TOPUPS = [UNIFORM, DSNOT, OWL, ALPHA, NEURONAL]
SETUP = {  # of all experiments of the paper: its appendix "Experimental Setup"
    "saliencies": ["wanda"],
    "topups": TOPUPS,
    "sparsities": [0.6, 0.7, 0.8],
    "dataset": "c4",
    "sampling": "authors",
    "num_samples": 128,
    "num_alignment_samples": 8,
    "evaluate": ["wikitext2", "c4", "ptb"],
}
ONLY_WIKITEXT2 = SETUP | {"evaluate": ["wikitext2"]}
ONLY_NEURONAL = SETUP | {"topups": [NEURONAL]}
STEP = f"{NEURONAL},steps=block"
EXPERIMENTS: dict[str, dict[str, Any]] = {
    # Perplexities and zero-shot accuracies. SparseGPT has no rows of DSnoT and AlphaPruning.
    "paper": SETUP
    | {
        "saliencies": ["magnitude", "multiflow", "wanda", "sparsegpt:variant=authors"],
        "without": ["sparsegpt+dsnot", "sparsegpt+alpha_pruning"],
        "tasks": ["paper"],
        "accuracy_over": ["multiflow", "wanda"],  # as Table 6
    },
    # How sparsity rises with depth, at one lambda (Table 2).
    "paper-schedules": SETUP
    | {
        "topups": [
            UNIFORM,
            OWL,
            *(f"{STEP},block_lambdas=[0.08],schedule={name}" for name in ("exponential", "logarithmic", "linear")),
        ]
    },
    # Seconds.
    "paper-runtime": ONLY_WIKITEXT2 | {"sparsities": [0.65, 0.7, 0.75, 0.8]},
    # The perplexity at every lambda, and the lambdas that alignment and reconstruction error choose.
    "paper-lambdas": SETUP
    | {"topups": [STEP, f"{STEP},metric=reconstruction", *(f"{STEP},block_lambdas=[{value}]" for value in LAMBDAS)]},
    # NeuronAL with other distances than the alignment's.
    "paper-distances": ONLY_WIKITEXT2
    | {"topups": [NEURONAL, *(f"{NEURONAL},metric={name}" for name in ("reconstruction", "cosine", "kl"))]},
    "paper-sparsities": SETUP | {"sparsities": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8]},
    # Sensitivity to the calibration data.
    "paper-seeds": ONLY_NEURONAL | {"sweep": {"seed": [0, 16, 46]}},
    "paper-sources": ONLY_NEURONAL | {"sparsities": [0.7], "sweep": {"dataset": ["wikitext2", "c4", "ptb"]}},
    "paper-samples": ONLY_NEURONAL | {"sparsities": [0.7], "sweep": {"num_alignment_samples": [1, 2, 4, 8, 16]}},
    # Hyperparameters around those that the paper uses, OWL's M and lambda and AlphaPruning's epsilon.
    "paper-parameters": ONLY_WIKITEXT2
    | {
        "topups": [
            *(f"{OWL},outlier_factor={m},half_width={lam}" for m in (3, 5, 7, 10) for lam in (0.04, 0.08, 0.12, 0.2)),
            *(f"{ALPHA},epsilon={epsilon}" for epsilon in (0.1, 0.2, 0.3, 0.4, 0.5)),
        ]
    },
}


def experiment(name: str, **given: Any) -> dict[str, Any]:
    """Return the arguments of [`compare`] for an experiment of the paper. The given ones override them.

    A given method has the variant of the paper's tables, unless another is named.

    ```python
    compare(model, **experiment("paper", topups=["uniform", "neuronal"], sparsities=[0.7]))
    ```

    Args:
        name (`str`): a name in `EXPERIMENTS`.
        given: arguments of [`compare`].
    """
    check_choice("experiment", name, list(EXPERIMENTS))
    arguments = {**EXPERIMENTS[name], **given}
    for argument, kind in (("saliencies", "saliency"), ("topups", "topup")):
        if argument in given:
            texts = validate_strings(argument, given[argument], "['wanda']")
            methods = map(parse_method, texts)
            arguments[argument] = [format_method(one, authors_variant(kind, one) | own) for one, own in methods]
    return arguments
