"""The fields of `NeuronALConfig`: type, default and explanation of each. The command line makes its flags from them."""

import json
import os
from collections.abc import Sequence
from dataclasses import KW_ONLY, MISSING, Field, dataclass, field
from types import NoneType, UnionType
from typing import Any, get_args


DATASETS = (
    "c4, wikitext2, ptb; a Hub dataset as ID, ID:SPLIT, ID:SPLIT:COLUMN or ID:CONFIG:SPLIT:COLUMN; or a local text, .csv, "
    ".json, .jsonl or .parquet file (PATH or PATH:COLUMN), of text or conversations"
)


def config_field(default: Any, help: str, **metadata: Any) -> Any:
    """Return a field of the config with its explanation.

    Metadata: `unset`, the meaning of None; the bounds or choices of [`hyper`]; `metavar` of the flag's value; `methods`, the
    package of the methods that the field names, and an `example` of one; `flag=False`: it has no flag.
    """
    return field(default=default, metadata={**metadata, "help": help})


def _hyperparameters(method: str) -> Any:
    return field(default_factory=dict, metadata={"help": f"hyperparameters of the {method}", "flag": False})


@dataclass(init=False, repr=False, eq=False)  # NeuronALConfig generates these
class ConfigFields:
    """The fields of [`NeuronALConfig`], which checks them. The metadata of each explains it, see `config_field`."""

    sparsity: float = config_field(
        MISSING,
        "share of the weights in the decoder blocks' linear projections to set to zero, in [0, 1), such as 0.7",
        metavar="SHARE",
    )
    saliency: str = config_field(
        "alps",
        "method that scores the weights; alps and sparsegpt also update the weights that they keep",
        methods="saliency",
        example="ria:power=1.0",
    )
    saliency_args: dict[str, Any] = _hyperparameters("saliency")
    topup: str | None = config_field(
        None,
        "method that decides how much of each block, projection and row is pruned",
        unset="neuronal; uniform if the saliency updates weights, or with a pattern",
        methods="topup",
        example="owl:half_width=0.1",
    )
    topup_args: dict[str, Any] = _hyperparameters("top-up")
    _: KW_ONLY
    dataset: str | Sequence[str] | None = config_field(
        "c4",
        f"calibration text, of several datasets in equal parts or with shares, such as c4:0.8 chat.jsonl:0.2: {DATASETS}",
    )
    num_samples: int = config_field(128, "calibration sequences", least=1)
    num_alignment_samples: int = config_field(
        8, "number of calibration sequences, from the first one on, that the top-up compares candidates on", least=1
    )
    seq_length: int | None = config_field(
        None, "tokens in each sequence", unset="2048, or the model's longest sequence if that is shorter", least=2
    )
    min_expert_tokens: int = config_field(
        32, "an MoE expert with fewer calibration tokens is pruned as if all its inputs were equally active", least=1
    )
    seed: int = config_field(0, "seed for drawing the calibration sequences", least=0)
    sampling: str = config_field(
        "distinct",
        "how calibration sequences are drawn. distinct: documents repeat only after all long enough ones were used; "
        "authors: the draw of NeuronAL's authors, with replacement",
        choices=("distinct", "authors"),
    )
    add_bos: bool | None = config_field(
        None,
        "begin every calibration sequence and test window that is cut from text with the tokenizer's BOS token",
        unset="yes for Gemma models, else no",
    )
    targets: Sequence[str] | None = config_field(
        None,
        "regular expressions, searched in module names: only projections that match one are pruned, and sparsity is "
        "counted over them",
        unset="all projections",
        metavar="REGEX",
    )
    ignore: Sequence[str] | None = config_field(
        None,
        "regular expressions, searched in module names: projections that match one are not pruned",
        unset="none",
        metavar="REGEX",
    )
    pattern: str | None = config_field(
        None,
        "keep N of every M consecutive weights of a row, such as 2:4, with a sparsity of 1 - N/M everywhere",
        unset="zeros may be anywhere in a row",
        metavar="N:M",
    )
    refit_epochs: int = config_field(
        0,
        "epochs of gradient descent that fit the kept weights of each block, with a saliency that updates weights, "
        "best with uniform sparsity; 0: no refit",
        least=0,
    )
    refit_learning_rate: float = config_field(
        0.01,
        "size of the refit's first steps, as a share of the weights' root mean square; above 0",
        least=0,
        above=True,
    )
    refit_dtype: str | None = config_field(
        None,
        "dtype of the matrix products in a refit of float32 weights, float32 or bfloat16",
        choices=("float32", "bfloat16"),
        unset="bfloat16 if the CPU multiplies it faster (AMX, AVX-512 BF16) and the hidden size is at least 512, else the weights' own",
    )


def explain(entry: Field) -> str:
    """Return what a field means and what None stands for, in a line."""
    unset = entry.metadata.get("unset")
    return entry.metadata["help"] + (f". None: {unset}" if unset else "")


def value_type(entry: Field) -> Any:
    """Return the type of a field's values, without None: that of one value, if there may be several."""
    parts = get_args(entry.type) if isinstance(entry.type, UnionType) else (entry.type,)
    return next(part for part in parts if part is not NoneType)


def check_dataset_names(given: Any, in_memory: str) -> list[str]:
    """Return one or more names and paths of datasets as text. `in_memory` says where other data go."""
    names = [given] if isinstance(given, str | os.PathLike) else given
    if not isinstance(names, list | tuple) or not all(isinstance(name, str | os.PathLike) for name in names):
        raise TypeError(f"dataset is a {type(names).__name__}: expected names or paths. {in_memory}")
    return [*map(os.fspath, names)]


def as_json(value: Any) -> Any:
    """Return a value as it comes back from JSON: lists for tuples, arrays and tensors, and Python's own numbers."""
    return json.loads(
        json.dumps(value, default=lambda other: other.tolist() if hasattr(other, "tolist") else list(other))
    )
