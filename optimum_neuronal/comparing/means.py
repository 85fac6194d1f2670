"""Means over the comparisons of several models, as in the paper's tables."""

from collections.abc import Sequence
from pathlib import Path

from ..common.display import Column, Table, format_markdown
from ..files.atomic import write_atomically
from ..files.directories import check_writable
from .comparison import MEANS, Comparison, aggregate_table, explain, measured_columns
from .results import Result, aggregate, grouped


PAGE = "means.md"


def merge(directories: Sequence[str | Path], output: str | Path) -> str:
    """Write the means over finished comparisons of several models to `means.md` in a directory, and return them.

    The first table has all models side by side. The second has AccRet and PPLFac over models, saliencies and test sets.
    """
    folder = check_writable(output, "write means to")
    if (folder / PAGE).exists() and MEANS not in (folder / PAGE).read_text(encoding="utf-8", errors="replace"):
        raise FileExistsError(f"{folder / PAGE} was not written by a comparison: choose another directory.")
    found = [Comparison.load(directory) for directory in directories]
    means = aggregate((one.dense, one.results) for one in found)
    notes = [f"{one.model}: {' '.join(one.notes())}" for one in found]
    tables = format_markdown(*_side_by_side(found)), explain(means), format_markdown(*aggregate_table(means))
    text = "\n\n".join([*notes, *tables])
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / PAGE, f"# {', '.join(one.model for one in found)}\n\n{text}\n".encode())
    return text


def _side_by_side(comparisons: Sequence[Comparison]) -> Table:
    """Return a table with a row per method and columns of every model. The best of every saliency and amount is marked."""
    method = ("sparsity", "budget", "saliency", "topup")
    by_method = [grouped([one.dense, *one.results], *method) for one in comparisons]
    keys = list(dict.fromkeys(key for own in by_method for key in own))
    heads = [Result(sparsity, saliency, topup, budget=budget) for sparsity, budget, saliency, topup in keys]
    columns = [
        Column("amount", [head.target for head in heads]),
        Column("saliency", [head.saliency for head in heads]),
    ]
    columns.append(Column("top-up", [head.topup for head in heads]))
    for one, own in zip(comparisons, by_method):
        columns += measured_columns(one.dense, [own.get(key, []) for key in keys], f"{one.model} ")
    return Table.of(columns, [key[:3] for key in keys])
