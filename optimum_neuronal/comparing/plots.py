"""Figures of what pruning decided and what it brought, as PNG and SVG. The extra `report` installs matplotlib."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from .averages import geometric_mean
from .figures.block_sparsity import plot_block_sparsity
from .figures.canvas import check_matplotlib
from .figures.lambda_curve import plot_lambda_curve
from .figures.perplexity_by_bits import plot_perplexity_by_bits
from .figures.perplexity_by_seconds import over, plot_perplexity_by_seconds
from .figures.row_sparsity import plot_row_sparsity
from .figures.styles import Style, make_styles
from .results import Result, told_bits


BY_SECONDS, BY_BLOCK, BY_ROW, BY_LAMBDA = "perplexity-by-seconds", "block-sparsity", "row-sparsity", "lambda"
FIGURES = tuple(f"{name}*.{kind}" for name in (BY_SECONDS, BY_BLOCK, BY_ROW, BY_LAMBDA) for kind in ("png", "svg"))
LONGEST = 80  # characters of a method's name in that of a file

__all__ = [
    "check_matplotlib",
    "plot_block_sparsity",
    "plot_lambda_curve",
    "plot_perplexity_by_bits",
    "plot_perplexity_by_seconds",
    "plot_results",
    "plot_row_sparsity",
]


def plot_results(model: str, dense: Result, results: Sequence[Result], directory: str | Path) -> list[Path]:
    """All figures that the results of a comparison allow, in its directory.

    `perplexity-by-seconds`; `perplexity-by-bits`, where there are several sparsities or numbers of bits; for every
    saliency, sparsity and number of bits `block-sparsity-...`, for every result of a top-up by row `row-sparsity-...`, and `lambda-...` where the block step was taken with several single lambdas:
    `neuronal:steps=block,block_lambdas=[0.1]`. A top-up has the same colour in all of them, and a shade means the same
    sparsity in all heat maps.

    Args:
        model (`str`): what was pruned.
        dense ([`Result`]): the dense model's figures.
        results (`Sequence[Result]`): those that failed are left out.
        directory (`str` or `Path`): an existing folder.

    Returns:
        `list[Path]`: of the files written, .png and .svg.
    """
    styles = make_styles(result.topup for result in results)  # of those that failed too, for a later run
    results = [result for result in results if result.error is None]
    if not results:
        return []
    folder = Path(directory)
    runs = [vars(result) for result in results]
    path = folder / BY_SECONDS
    paths = plot_perplexity_by_seconds(runs, path, title=model, dense=dense.perplexity, styles=styles)
    by_bits = [run for run in runs if run["bits_per_weight"] is not None]
    if len({(run["sparsity"], run["value_bits"]) for run in by_bits}) > 1:
        path = folder / "perplexity-by-bits"
        paths += plot_perplexity_by_bits(by_bits, path, title=model, dense=dense.perplexity, styles=styles)
    return paths + _plot_groups(model, results, folder, styles)


def _plot_groups(model: str, results: Sequence[Result], folder: Path, styles: Mapping[str, Style]) -> list[Path]:
    """The figures of results with the same saliency, sparsity and number of bits."""
    scale, paths = _scale(results), []
    groups: dict[tuple[str, float, int | None], list[Result]] = {}
    for result in results:
        groups.setdefault((result.saliency, result.sparsity, result.value_bits), []).append(result)
    for (saliency, sparsity, bits), members in groups.items():
        stem = _stem(f"{saliency}-{100 * sparsity:g}" + ("" if bits is None else f"-{bits}bits"))
        target = f"{100 * sparsity:.4g} % sparsity{told_bits(bits)}"
        by_method = {result.topup: result.block_sparsity for result in members}
        title = f"{model}, {saliency}, {target}"
        paths += plot_block_sparsity(by_method, folder / f"{BY_BLOCK}-{stem}", title=title, styles=styles)
        for result in members:
            if result.row_sparsity:
                path = folder / f"{BY_ROW}-{stem}-{_stem(result.topup)}"
                name = f"{model}, {saliency} + {result.topup}, {target}"
                paths += plot_row_sparsity(result.row_sparsity, path, title=name, scale=scale)
        paths += _plot_lambdas(members, folder / f"{BY_LAMBDA}-{stem}", title)
    return paths


def _scale(results: Sequence[Result]) -> tuple[float, float] | None:
    """The least and the largest sparsity of rows in any result, None if none has rows."""
    rows = [shares for result in results for shares in result.row_sparsity.values()]
    return (min(map(min, rows)), max(map(max, rows))) if rows else None


def _plot_lambdas(results: Sequence[Result], path: Path, title: str) -> list[Path]:
    """Perplexity by lambda of the block step, from results with a single lambda each, if there are enough."""
    block_only = [r for r in results if r.block_lambda is not None and r.row_lambda is None and r.perplexity]
    chosen = next((r.block_lambda for r in block_only if len(r.decisions["block"]["candidates"]) > 1), None)
    curve = {r.block_lambda: geometric_mean(list(r.perplexity.values())) for r in block_only}
    if chosen is None or len(curve) < 3:
        return []
    title = f"{title}: perplexity {over(sorted(block_only[0].perplexity))}"
    return plot_lambda_curve(list(curve.items()), chosen, path, "Perplexity (lower is better)", title=title)


def _stem(name: str) -> str:
    """A name as part of a file's, without points, which begin a suffix; a long one is cut, with a digest of the whole."""
    stem = re.sub(r"[^\w-]+", "_", name).strip("_")
    return stem if len(stem) <= LONGEST else f"{stem[:LONGEST]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
