"""The fields of `NeuronALConfig`: each with its type, its default and what it means, and the old names of some.

The command line is derived from them, and built whenever `optimum-cli` starts: this module imports nothing heavy.
"""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple

from .efforts import EFFORTS, told


FORMATS = ("dense", "packed")  # of a saved model
HEAD_BITS = 8  # the only ones that embeddings and head can have
DATASETS = (
    "c4, wikitext2, ptb; a Hub dataset as ID, ID:SPLIT, ID:SPLIT:COLUMN or ID:CONFIG:SPLIT:COLUMN; or a local .txt, .csv, "
    ".jsonl or .parquet file, or a folder of them (PATH or PATH:COLUMN)"
)


def check_sparsity(value: Any) -> float:
    """The value, if it is a share of weights that can be zero; otherwise `TypeError` or `ValueError`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"sparsity is {value!r}: expected a number in [0, 1), such as 0.7.")
    if not 0 <= value < 1:
        hint = f" Did you mean {value / 100:g}?" if 1 < value < 100 else ""
        raise ValueError(f"sparsity is {value}: expected a share in [0, 1), such as 0.7.{hint}")
    return value


def check_embedding_bits(value: Any, format: str) -> None:
    """Raises `TypeError` or `ValueError` if embeddings and head cannot be saved with so many bits in a format; None: as ever."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(
            f"embedding_bits is {value!r}: expected 8, or None to leave token embeddings and head as they are."
        )
    if value != HEAD_BITS:
        raise ValueError(
            f"embedding_bits is {value}: expected 8, or None to leave token embeddings and head as they are."
        )
    if format != "packed":
        raise ValueError(f"embedding_bits is {value}, but the format {format!r}: it needs format='packed'.")


@dataclass(init=False, repr=False, eq=False)  # NeuronALConfig has these; to generate them takes milliseconds
class ConfigFields:
    """The fields of [`NeuronALConfig`], which documents and checks them. What `metadata` holds:

    - `help`: what the field means, in a line; a field without it has no flag on the command line.
    - `default`, of fields that are None by default: what that means, in words.
    - `metavar`: how the flag's value is called.
    - `room` and `example`, of the names of methods: the folder that they lie in, and one with a hyper-parameter.
    """

    sparsity: float | None = field(
        default=None,
        metadata={
            "help": "share of the projections' weights to set to zero: 0.7",
            "default": "required, here or by --config, unless there are --bits-per-weight",
            "metavar": "SHARE",
        },
    )
    saliency: str | None = field(
        default=None,
        metadata={
            "help": "how weights are scored",
            "room": "saliency",
            "example": "ria:power=1.0",
            "default": f"{told('saliency')}; wanda with besa and dsnot",
        },
    )
    saliency_args: dict[str, Any] = field(default_factory=dict)
    topup: str | None = field(
        default=None,
        metadata={
            "help": "where the sparsity goes",
            "room": "topup",
            "example": "owl:half_width=0.1",
            "default": f"{told('topup')}; uniform with a pattern",
        },
    )
    topup_args: dict[str, Any] = field(default_factory=dict)
    _: KW_ONLY  # what is called by its position below would be another field than in earlier releases
    effort: str = field(
        default="default",
        metadata={"help": f"what the fields that are not given are, from quick to good: {', '.join(EFFORTS)}"},
    )
    dataset: str | None = field(default="c4", metadata={"help": f"calibration text: {DATASETS}"})
    num_samples: int = field(default=128, metadata={"help": "calibration sequences"})
    num_alignment_samples: int = field(
        default=8, metadata={"help": "how many of them the top-up measures its candidates on"}
    )
    seq_length: int | None = field(
        default=None,
        metadata={"help": "tokens per sequence", "default": "the smaller of 2048 and what the model admits"},
    )
    batch_size: int | None = field(
        default=None,
        metadata={
            "help": "sequences per forward: memory and speed, and the result by rounding at most",
            "default": "what makes about 2048 tokens",
        },
    )
    max_hidden_bytes: int | None = field(
        default=None,
        metadata={
            "help": "hidden states beyond this many bytes wait in CPU memory: memory and speed, not the result",
            "default": "they stay on the device",
        },
    )
    min_expert_tokens: int = field(
        default=32,
        metadata={
            "help": "an expert that receives fewer calibration tokens is pruned as if all its inputs were equally active"
        },
    )
    seed: int = field(default=0, metadata={"help": "seed of the draw of calibration sequences"})
    targets: Sequence[str] | None = field(
        default=None,
        metadata={
            "help": "regular expressions: prune only modules whose names match",
            "default": "all projections",
            "metavar": "REGEX",
        },
    )
    ignore: Sequence[str] | None = field(
        default=None,
        metadata={
            "help": "regular expressions: leave out modules whose names match",
            "default": "none",
            "metavar": "REGEX",
        },
    )
    pattern: str | None = field(
        default=None,
        metadata={
            "help": "keep N of every M consecutive weights of a row (2:4, 4:8), with --topup uniform",
            "default": "zeros may lie anywhere in a row",
            "metavar": "N:M",
        },
    )
    reconstruct: str | None = field(
        default=None,
        metadata={
            "help": "what a saliency that updates weights brings outputs near to: dense, the dense model's own; or block, "
            "those of the dense block on what the sparse ones before it put out",
            "default": "dense for alps, block for sparsegpt",
        },
    )
    refit_epochs: int | None = field(
        default=None,
        metadata={
            "help": "epochs in which the kept weights of each block are fitted by gradients; 0: none",
            "default": told("refit_epochs"),
        },
    )
    refit_learning_rate: float = field(
        default=0.04,
        metadata={"help": "how far a step of --refit-epochs moves weights, as a share of their root mean square"},
    )
    value_bits: int | None = field(
        default=None,
        metadata={
            "help": "round the kept values to so many bits: 8, 4, 3 or 2; with --format packed they are stored so",
            "default": "values stay as they are",
        },
    )
    bits_per_weight: float | None = field(
        default=None,
        metadata={
            "help": "bits a weight that masks, codes and scales may take in all, 2.4 for instance: with --sparsity, "
            "--value-bits follow from it; with these, sparsity; alone, what loses least is chosen",
            "default": "as sparsity and value bits have it",
        },
    )
    embedding_bits: int | None = field(
        default=None,
        metadata={
            "help": "round token embeddings and head to so many bits, 8, and store them so, with --format packed",
            "default": "they stay as they are",
        },
    )
    format: str = field(
        default="dense",
        metadata={
            "help": "how weights are saved: dense, ordinary safetensors with zeros; or packed, the non-zero values and "
            "bitmasks, which load with this package only"
        },
    )


class Alias(NamedTuple):
    """The name of a hyper-parameter that was a field of the config once, and is still understood in its place.

    Args:
        topups (`tuple[str, ...]`): the top-ups whose hyper-parameter it is.
        type: of its values, written as a field's.
        default: what those top-ups take if it is not given; here for the command line to tell.
        help (`str`): what it means, in a line.
        metavar (`str`, *optional*): how the flag's value is called.
    """

    topups: tuple[str, ...]
    type: Any
    default: Any
    help: str
    metavar: str | None = None


LAMBDAS = (0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.07, 0.08, 0.09, 0.1, 0.12, 0.15, 0.2, 0.25)

ALIASES = {
    "steps": Alias(("neuronal",), str, "both", "steps of --topup neuronal: both, block or row"),
    "reference": Alias(
        ("neuronal",), str, "sparse-stream", "where dense activations come from: sparse-stream or dense"
    ),
    "alignment_scope": Alias(
        ("neuronal",), str, "sequence", "alignment error by sequence (the paper) or pooled (its authors' code)"
    ),
    "block_lambdas": Alias(
        ("neuronal",), Sequence[float], LAMBDAS, "half-widths of the sparsity window, block step", "X"
    ),
    "row_lambdas": Alias(
        ("neuronal",), Sequence[float], (0.0, *LAMBDAS), "half-widths of the sparsity window, row step", "X"
    ),
}
