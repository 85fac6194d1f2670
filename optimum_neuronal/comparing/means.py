"""Means over the comparisons of several models, as in the paper's tables."""

from collections.abc import Sequence
from pathlib import Path

from ..common.display import Column, Table, format_markdown
from ..files.atomic import write_atomically
from ..files.directories import check_writable
from .comparison import Comparison
from .results import Result, aggregate, group_by
from .tables import MEANS, aggregate_caption, aggregate_table, measured_columns


PAGE = "means.md"
METHOD = ("sparsity", "saliency", "topup")  # what distinguishes combinations


def merge(directories: Sequence[str | Path], output: str | Path) -> str:
    """Write the means over finished comparisons of several models to `means.md` in a directory, and return them.

    The first table has all models side by side. The second has AccRet and PPLFac over models, saliencies and test sets.
    """
    folder = check_writable(output, "write means to")
    if (folder / PAGE).exists() and MEANS not in (folder / PAGE).read_text(encoding="utf-8", errors="replace"):
        raise FileExistsError(f"{folder / PAGE} was not written by a comparison: choose another directory.")
    comparisons = [Comparison.load(directory) for directory in directories]
    _check_comparable(comparisons)
    means = aggregate(((one.dense, one.results) for one in comparisons), comparisons[0].accuracy_over)
    notes = [f"{one.model}: {' '.join(one.notes())}" for one in comparisons]
    side_by_side = format_markdown(*_side_by_side(comparisons))
    text = "\n\n".join([*notes, side_by_side, aggregate_caption(means), format_markdown(*aggregate_table(means))])
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / PAGE, f"# {', '.join(one.model for one in comparisons)}\n\n{text}\n".encode())
    return text


def _check_comparable(comparisons: Sequence[Comparison]) -> None:
    """Raise `ValueError` unless all comparisons have the same test sets, tasks and saliencies of AccRet."""
    first = comparisons[0]
    for one in comparisons[1:]:
        for kind, measured in (
            ("test sets", lambda each: sorted(each.dense.perplexity)),
            ("tasks", lambda each: sorted(each.dense.accuracy)),
            ("saliencies of AccRet", lambda each: each.accuracy_over and sorted(each.accuracy_over)),
        ):
            if measured(one) != measured(first):
                raise ValueError(
                    f"The comparisons of {first.model} and {one.model} have different {kind}, {measured(first)} and "
                    f"{measured(one)}: measure both on the same."
                )


def _side_by_side(comparisons: Sequence[Comparison]) -> Table:
    """Return a table with a row per method and columns of every model. The best of every saliency and sparsity is marked."""
    by_method = [group_by([one.dense, *one.results], *METHOD) for one in comparisons]
    keys = list(dict.fromkeys(key for groups in by_method for key in groups))
    heads = [Result(*key) for key in keys]
    columns = [
        Column("amount", [head.target for head in heads]),
        Column("saliency", [head.saliency for head in heads]),
        Column("top-up", [head.topup for head in heads]),
    ]
    for one, groups in zip(comparisons, by_method):
        columns += measured_columns(one.dense, [groups.get(key, []) for key in keys], f"{one.model} ")
    return Table.of(columns, [key[:2] for key in keys])
