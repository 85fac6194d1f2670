"""Figures of what pruning decided and what it brought, as PNG and SVG. The extra `report` installs matplotlib."""

import re
from collections.abc import Sequence
from pathlib import Path

from .figures.block_sparsity import plot_block_sparsity
from .figures.canvas import check_matplotlib
from .figures.lambda_curve import plot_lambda_curve
from .figures.perplexity_by_seconds import plot_perplexity_by_seconds
from .figures.row_sparsity import plot_row_sparsity
from .results import Comparison, geometric_mean


__all__ = [
    "check_matplotlib",
    "plot_block_sparsity",
    "plot_comparison",
    "plot_lambda_curve",
    "plot_perplexity_by_seconds",
    "plot_row_sparsity",
]


def plot_comparison(comparison: Comparison, directory: str | Path) -> list[Path]:
    """All figures that the results of a comparison allow, in its directory.

    `perplexity-by-seconds`; for every saliency and sparsity `block-sparsity-...`, for every result of a top-up by row
    `row-sparsity-...`, and `lambda-...` where the block step was taken with several single lambdas:
    `neuronal:steps=block,block_lambdas=[0.1]`.

    Args:
        comparison ([`Comparison`]): its failed results are left out.
        directory (`str` or `Path`): an existing folder.

    Returns:
        `list[Path]`: of the files written, .png and .svg.
    """
    results = [result for result in comparison.results if result.error is None]
    if not results:
        return []
    folder = Path(directory)
    paths = plot_perplexity_by_seconds([vars(result) for result in results], folder / "perplexity-by-seconds")
    groups: dict[str, list] = {}
    for result in results:
        groups.setdefault(f"{result.saliency}-{100 * result.sparsity:g}", []).append(result)
    for name, members in groups.items():
        stem = _stem(name)
        by_method = {result.topup: result.block_sparsity for result in members}
        paths += plot_block_sparsity(by_method, folder / f"block-sparsity-{stem}")
        for result in members:
            if result.row_sparsity:
                paths += plot_row_sparsity(result.row_sparsity, folder / f"row-sparsity-{stem}-{_stem(result.topup)}")
        paths += _plot_lambdas(members, folder / f"lambda-{stem}")
    return paths


def _plot_lambdas(results: Sequence, path: Path) -> list[Path]:
    """Perplexity by lambda of the block step, from results with a single lambda each, if there are enough."""
    block_only = [r for r in results if r.block_lambda is not None and r.row_lambda is None and r.perplexity]
    chosen = next((r.block_lambda for r in block_only if len(r.decisions["block"]["candidates"]) > 1), None)
    curve = {r.block_lambda: geometric_mean(list(r.perplexity.values())) for r in block_only}
    if chosen is None or len(curve) < 3:
        return []
    return plot_lambda_curve(list(curve.items()), chosen, path, "perplexity")


def _stem(name: str) -> str:
    """A name as part of a file's, without points, which begin a suffix."""
    return re.sub(r"[^\w-]+", "_", name).strip("_")
