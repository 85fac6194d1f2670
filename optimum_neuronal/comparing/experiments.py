"""Experiments: arguments of [`compare`] by name. `optimum-cli` reads this file at every start, so it imports nothing."""

from typing import Any


NEURONAL = "neuronal:variant=authors"
TOPUPS = ["uniform", "dsnot:variant=authors", "owl", "alpha_pruning:variant=authors", NEURONAL]
LAMBDAS = (0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.07, 0.08, 0.09, 0.10, 0.12, 0.15, 0.20, 0.25)
SETUP = {  # of all experiments of the paper: its appendix "Experimental Setup"
    "saliencies": ["wanda"],
    "sparsities": [0.6, 0.7, 0.8],
    "dataset": "c4",
    "num_samples": 128,
    "num_alignment_samples": 8,
    "evaluate": ["wikitext2", "c4", "ptb"],
}
EXPERIMENTS: dict[str, dict[str, Any]] = {
    # Perplexities and zero-shot accuracies, with AccRet and PPLFac. SparseGPT has no rows of DSnoT and AlphaPruning.
    "paper": SETUP
    | {
        "saliencies": ["magnitude", "multiflow", "wanda", "sparsegpt"],
        "topups": TOPUPS,
        "without": ["sparsegpt+dsnot", "sparsegpt+alpha_pruning", "sparsegpt+besa", "sparsegpt+dsa"],
        "tasks": ["paper"],
    },
    # Runtime and perplexity, with BESA and DSA.
    "paper-runtime": SETUP
    | {
        "topups": [*TOPUPS[:3], "besa:variant=authors", "dsa:variant=authors", *TOPUPS[3:]],
        "sparsities": [0.65, 0.7, 0.75, 0.8],
        "evaluate": ["wikitext2"],
    },
    # The perplexity at every lambda, and the lambdas that alignment and reconstruction error choose.
    "paper-lambdas": SETUP
    | {
        "topups": [
            f"{NEURONAL},steps=block{own}"
            for own in ("", ",metric=reconstruction", *(f",block_lambdas=[{value}]" for value in LAMBDAS))
        ]
    },
    # NeuronAL with other distances than the alignment's.
    "paper-distances": SETUP
    | {
        "topups": [NEURONAL, *(f"{NEURONAL},metric={name}" for name in ("reconstruction", "cosine", "kl"))],
        "evaluate": ["wikitext2"],
    },
    "paper-sparsities": SETUP | {"topups": TOPUPS, "sparsities": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8]},
    # Sensitivity to the calibration data.
    "paper-seeds": SETUP | {"topups": [NEURONAL], "sweep": {"seed": [0, 16, 46]}},
    "paper-sources": SETUP
    | {"topups": [NEURONAL], "sparsities": [0.7], "sweep": {"dataset": ["wikitext2", "c4", "ptb"]}},
    "paper-samples": SETUP
    | {"topups": [NEURONAL], "sparsities": [0.7], "sweep": {"num_alignment_samples": [1, 2, 4, 8, 16]}},
    # Hyper-parameters of OWL and AlphaPruning around the values that the paper uses.
    "paper-parameters": SETUP
    | {
        "topups": [
            *(
                f"owl:outlier_factor={m},half_width={width}"
                for m in (3, 5, 7, 10)
                for width in (0.04, 0.08, 0.12, 0.2)
            ),
            *(f"alpha_pruning:variant=authors,spread={epsilon}" for epsilon in (0.1, 0.2, 0.3, 0.4, 0.5)),
            NEURONAL,
        ],
        "sparsities": [0.7],
    },
}
