"""The fields of `NeuronALConfig`: type, default and explanation of each.

The flags of the command line are made of them whenever `optimum-cli` starts, so nothing heavy is imported here.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, MISSING, Field, dataclass, field, fields
from numbers import Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args

from ..common.validation import did_you_mean


# The fields that an effort decides where they are not given; `rates` is the topup if weights are quantised.
# docs/reconstruction.md has time and quality of each.
EFFORTS: dict[str, dict[str, Any]] = {
    "fast": {"saliency": "alps", "topup": "uniform", "refit_epochs": 0, "rotate": False, "rates": "uniform"},
    "default": {"saliency": "alps", "topup": "search", "refit_epochs": 0, "rotate": True, "rates": None},
    "best": {"saliency": "alps", "topup": "search", "refit_epochs": 6, "rotate": True, "rates": None},
}
RECIPES = Path(__file__).parents[1] / "recipes"
DATASETS = (
    "c4, wikitext2, ptb; a Hub dataset as ID, ID:SPLIT, ID:SPLIT:COLUMN or ID:CONFIG:SPLIT:COLUMN; or a local .txt, .csv, "
    ".jsonl or .parquet file, or a folder of them (PATH or PATH:COLUMN)"
)


def by_effort(name: str) -> str:
    """Return in words what the efforts make of a field: `"alps"`, or `"20 with effort best, else 0"`."""
    values = {effort: decided[name] for effort, decided in EFFORTS.items()}
    usual = values["default"]
    others = [f"{value} with effort {effort}" for effort, value in values.items() if value != usual]
    return ", ".join([*others, f"else {usual}"]) if others else str(usual)


def _field(default: Any, help: str, **metadata: Any) -> Any:
    """Return a field of the config.

    Args:
        default: its default; a class stands for a call of it.
        help (`str`): what it means.
        metadata:
            `unset` (`str`): what None means, in words. `least` (`int`): the smallest whole number that is allowed.
            `metavar` (`str`): name of the flag's value. `room` and `example` (`str`), of names of methods: the folder
            of the methods, and one of them with a hyper-parameter. `flag` (`bool`): False for a field without a flag.
    """
    metadata["help"] = help
    return (
        field(default_factory=default, metadata=metadata)
        if isinstance(default, type)
        else field(default=default, metadata=metadata)
    )


@dataclass(init=False, repr=False, eq=False)  # NeuronALConfig has these; to generate them takes milliseconds
class ConfigFields:
    """The fields of [`NeuronALConfig`], which checks them. The explanation of each is its metadata, see `_field`."""

    sparsity: float | None = _field(
        None,
        "share of the weights in the decoder blocks' linear projections to set to zero, in [0, 1), such as 0.7",
        unset="required, unless bits_per_weight is given",
        metavar="SHARE",
    )
    saliency: str | None = _field(
        None,
        "method that scores the weights; alps and sparsegpt also update the kept weights, the other methods do not",
        unset=f"{by_effort('saliency')}; wanda with besa and dsnot",
        room="saliency",
        example="ria:power=1.0",
    )
    saliency_args: dict[str, Any] = _field(dict, "hyper-parameters of the saliency", flag=False)
    topup: str | None = _field(
        None,
        "method that decides how much each projection is pruned; with bits_per_weight, uniform gives projections rates as equal as possible",
        unset=f"{by_effort('topup')}; uniform with a pattern; with bits_per_weight, rates by what the model loses",
        room="topup",
        example="owl:half_width=0.1",
    )
    topup_args: dict[str, Any] = _field(dict, "hyper-parameters of the top-up", flag=False)
    _: KW_ONLY
    effort: str = _field(
        "default",
        f"how much time to spend, from least to most: {', '.join(EFFORTS)}; chooses saliency, topup, refit_epochs and "
        "rotate unless they are given",
    )
    dataset: str | None = _field("c4", f"calibration text: {DATASETS}")
    num_samples: int = _field(128, "calibration sequences", least=1)
    num_alignment_samples: int | None = _field(
        None,
        "calibration sequences, from the first, on which the top-up measures its candidates",
        unset="8, or num_samples if that is less",
        least=1,
    )
    seq_length: int | None = _field(
        None, "tokens in each sequence", unset="2048, or the model's longest sequence if that is shorter", least=2
    )
    min_expert_tokens: int = _field(
        32,
        "an expert of a mixture that receives fewer calibration tokens is pruned as if all its inputs were equally active",
        least=1,
    )
    seed: int = _field(0, "seed of the draw of calibration sequences", least=0)
    targets: Sequence[str] | None = _field(
        None,
        "regular expressions, searched in module names: only projections that match one are pruned, and sparsity is "
        "counted over them",
        unset="all projections",
        metavar="REGEX",
    )
    ignore: Sequence[str] | None = _field(
        None,
        "regular expressions, searched in module names: projections that match one are left out",
        unset="none",
        metavar="REGEX",
    )
    pattern: str | None = _field(
        None,
        "keep N of every M consecutive weights of a row, such as 2:4, with a sparsity of 1 - N/M everywhere",
        unset="zeros may lie anywhere in a row",
        metavar="N:M",
    )
    reconstruct: str | None = _field(
        None,
        "outputs that updated weights are fitted to: dense, outputs of the dense model; or block, outputs of the dense "
        "block on inputs from the sparse blocks before it",
        unset="dense for alps, block for sparsegpt",
    )
    refit_epochs: int | None = _field(
        None,
        "epochs in which the kept weights of each block are fitted by gradients, with a saliency that updates weights; 0: none",
        unset=by_effort("refit_epochs"),
        least=0,
    )
    refit_learning_rate: float = _field(
        0.04, "size of the refit's first steps, as a share of the weights' root mean square; above 0"
    )
    rotate: bool | None = _field(
        None,
        "rotate the residual stream and the values of attention heads first, so that less is lost; unties head and embeddings",
        unset="with efforts default and best, if saliency is not given either, rotate if the model can be rotated, but only the "
        "attention heads if head and embeddings are tied; else do not rotate",
    )
    rotate_args: dict[str, Any] = _field(dict, "hyper-parameters of the rotation", flag=False)
    bits_per_weight: float | None = _field(
        None,
        "quantise the weights instead of setting some to zero: mean bits per weight with scales, above 2, such as 2.4; "
        "each projection gets 2 to 8 bits, more if the model loses more by its rounding",
        unset="nothing is quantised",
    )
    embedding_bits: int | None = _field(
        None,
        "round token embeddings and head to 8 bits, with a scale for each row; saved only in the packed format",
        unset="they are not rounded",
    )


def find_recipe(name: str | Path) -> Path:
    """Return the path of a file with fields of the config.

    Args:
        name (`str` or `Path`):
            As text, the name of one of the package's recipes, in every working directory: a file there is `"./balanced"`.
            Anything else, and every `Path`, is the path of a file.

    Raises:
        `FileNotFoundError`: there is neither.
    """
    known = {path.stem: path for path in sorted(RECIPES.glob("*.yaml"))}
    if name in known:
        return known[str(name)]
    if not Path(name).is_file():
        hint = did_you_mean(Path(name).stem, known)
        raise FileNotFoundError(
            f"The recipe {str(name)!r} does not exist: check its path, or name one of {', '.join(known)}.{hint}"
        )
    return Path(name)


def explain(entry: Field) -> str:
    """Return what a field means and what None stands for, in a line."""
    unset = entry.metadata.get("unset")
    return entry.metadata["help"] + (f". None: {unset}" if unset else "")


def kind_of(entry: Field) -> Any:
    """Return the type of a field's values, without None."""
    parts = get_args(entry.type) if isinstance(entry.type, UnionType) else (entry.type,)
    (kind,) = (part for part in parts if part is not NoneType)
    return kind


def arguments() -> str:
    """Return the section of a docstring that explains every field."""
    lines = []
    for entry in fields(ConfigFields):
        name = (
            str(kind_of(entry)).removeprefix("collections.abc.")
            if get_args(kind_of(entry))
            else kind_of(entry).__name__
        )
        optional = "" if entry.default_factory is MISSING and entry.default is not None else ", *optional*"
        lines.append(f"        {entry.name} (`{name}`{optional}): {explain(entry)}.")
    return "\n".join(["Args:", *lines])


def as_json(value: Any) -> Any:
    """Return a value as it comes back from JSON: lists for arrays, tuples and iterators, and Python's own numbers.

    So a config equals the one that is made of its saved dict, and an iterator is read once.
    """
    if isinstance(value, Mapping):
        return {key: as_json(part) for key, part in value.items()}
    if hasattr(value, "tolist"):  # arrays, tensors and their scalars
        return value.tolist()
    if isinstance(value, Real) and not isinstance(value, (int, float)):
        return float(value)
    if isinstance(value, (list, tuple, range, Iterator)):
        return [as_json(part) for part in value]
    return value
