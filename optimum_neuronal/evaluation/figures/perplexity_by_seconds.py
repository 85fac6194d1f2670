"""Figures of what pruning decided and what it brought, as PNG and SVG. The extra `report` installs matplotlib."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np


# Okabe and Ito's palette, distinguishable by the colour-blind. Yellow comes last: it is faint on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES = ("-", "--", "-.", ":", (0, (6, 1, 1, 1, 1, 1)), (0, (8, 3)), (0, (1, 1)), (0, (4, 1)))
GREY = "#666666"
BINS = 64  # columns of the heat map
MAX_NAMES = 64  # more rows of the heat map than this are not all named
WIDTH = 8.0  # inches; at 900 pixels of a web page its text is as large as the page's
STYLE = {
    "font.size": 11,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#dddddd",
    "savefig.dpi": 150,
    "svg.fonttype": "none",  # text stays text: it can be searched, and read aloud
    "svg.hashsalt": "optimum-neuronal",  # otherwise ids are drawn by chance
}


def check_matplotlib() -> None:
    """Raises `ImportError` if figures cannot be drawn: to find that out before hours of measuring, not afterwards."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ImportError(f"Figures need matplotlib ({error}): pip install optimum-neuronal[report]") from error


def plot_perplexity_by_seconds(results: Sequence[Mapping[str, Any]], path: str | Path) -> list[Path]:
    """Perplexity against runtime, both on log axes: one panel per sparsity, one labelled point per method.

    The colour tells the top-up, the marker the saliency.

    Args:
        results: of every run `saliency`, `topup`, `sparsity` in [0, 1), `perplexity` (dataset -> at least 1),
            `allocation_seconds` and `pruning_seconds` (may be None), and `error` if there was one: such a run is left
            out. Drawn is the geometric mean over the datasets; an infinite one is named in the panel's title.
        path (`str` or `Path`): where to write, without a suffix.

    Returns:
        `list[Path]`: the PNG and the SVG file.

    Raises:
        `ImportError`: matplotlib is not installed.
        `ValueError`: no run without an error, runs on different datasets, a runtime of zero; a path with a suffix or
            in a folder that does not exist.
    """
    runs = [run for run in results if not run.get("error")]
    datasets = {tuple(sorted(run["perplexity"])) for run in runs}
    if len(datasets) != 1:
        found = "; ".join(", ".join(names) for names in sorted(datasets)) or "no run without an error"
        raise ValueError(f"One figure needs runs on the same datasets, but got: {found}.")
    points = [_point(run) for run in runs]
    sparsities = sorted({run["sparsity"] for run in runs})
    colours = _assign(COLOURS, [run["topup"] for run in runs])
    markers = _assign(MARKERS, [run["saliency"] for run in runs])
    with _figure(path, 1.0 + 3.6 * len(sparsities)) as (figure, written):
        panels = figure.subplots(len(sparsities), 1, sharex=True, squeeze=False)[:, 0]
        for panel, sparsity in zip(panels, sparsities):
            here = [(run, *point) for run, point in zip(runs, points) if run["sparsity"] == sparsity]
            for run, seconds, perplexity in here:
                if math.isfinite(perplexity):
                    style = {"color": colours[run["topup"]], "marker": markers[run["saliency"]], "label": _name(run)}
                    panel.plot([seconds], [perplexity], ls="none", ms=9, mec="black", alpha=0.75, **style)
            infinite = ", ".join(_name(run) for run, _, perplexity in here if math.isinf(perplexity))
            title = f"{100 * sparsity:.4g} % sparsity" + (f" (infinite: {infinite})" if infinite else "")
            panel.set_title(title, loc="left")
            panel.set(xscale="log", yscale="log", ylabel="Perplexity (lower is better)")
            panel.margins(0.14, 0.16)
        panels[-1].set_xlabel("Runtime in seconds: allocation and pruning")
        of = ", ".join(*datasets)
        title = f"Perplexity: geometric mean over {of}" if "," in of else f"Perplexity on {of}"
        figure.suptitle(title, x=0.01, ha="left", fontsize="medium")
        _label_log_axes(panels)
        _label_points(figure, panels)
    return written


def plot_lambda_curve(
    candidates: Sequence[tuple[float, float | None]], chosen: float, path: str | Path, quantity: str
) -> list[Path]:
    """A quantity against lambda, the half-width of the sparsity window, with the chosen lambda marked.

    Args:
        candidates: (lambda, value) of every candidate; None for one that was abandoned: it is shown without a height.
        chosen (`float`): the lambda that was chosen, one of the candidates with a value.
        path (`str` or `Path`): where to write, without a suffix.
        quantity (`str`): what the values are, with their unit: the label of the vertical axis.

    Returns and raises as [`plot_perplexity_by_seconds`]; `ValueError` also for a `chosen` that has no value.
    """
    candidates = sorted(candidates, key=lambda candidate: candidate[0])
    values = {lam: value for lam, value in candidates if value is not None}
    if chosen not in values:
        raise ValueError(f"chosen={chosen} is none of the candidates with a value: {', '.join(map(str, values))}.")
    abandoned = [lam for lam, value in candidates if value is None]
    with _figure(path, 3.6) as (figure, written):
        axes = figure.subplots()
        heights = [math.nan if value is None else value for _, value in candidates]
        axes.plot([lam for lam, _ in candidates], heights, "o-", color="black", ms=5, label="candidate")
        label = f"chosen: {chosen:g}"
        axes.plot([chosen], [values[chosen]], "D", color=COLOURS[4], mec="black", ms=11, label=label)
        if abandoned:
            # On the lower edge, since all that is known of them is that they lost.
            options = {"transform": axes.get_xaxis_transform(), "clip_on": False, "zorder": 3}
            axes.plot(abandoned, [0.0] * len(abandoned), "x", color=GREY, mew=2, ms=8, label="abandoned", **options)
        axes.set(xlabel="Lambda: half-width of the sparsity window", ylabel=quantity)
        axes.margins(y=0.12)
        _legend(figure, axes)
    return written


def plot_block_sparsity(by_method: Mapping[str, Sequence[float]], path: str | Path) -> list[Path]:
    """Sparsity of every decoder block, one line per method.

    Args:
        by_method: method -> shares of zeros in [0, 1], one per block; of every method as many.
        path (`str` or `Path`): where to write, without a suffix.

    Returns and raises as [`plot_perplexity_by_seconds`]; `ValueError` also for shares outside [0, 1] and for methods
    with different numbers of blocks.
    """
    _check_shares(by_method)
    if len({len(shares) for shares in by_method.values()}) > 1:
        counts = ", ".join(f"{name}: {len(shares)}" for name, shares in by_method.items())
        raise ValueError(f"The methods have different numbers of blocks ({counts}).")
    with _figure(path, 3.6) as (figure, written):
        axes = figure.subplots()
        for index, (name, shares) in enumerate(by_method.items()):
            turn, step = index % len(COLOURS), 1 + len(shares) // 16
            every = index % step, step  # markers of different lines at different blocks
            shift = (index + index // len(COLOURS)) % len(COLOURS)  # so that a colour that returns looks different
            style = {"color": COLOURS[turn], "marker": MARKERS[shift], "linestyle": DASHES[shift]}
            axes.plot(
                range(len(shares)), shares, lw=1.8, ms=6, mec="black", mew=0.4, label=name, markevery=every, **style
            )
        axes.set(xlabel="Decoder block", ylabel="Sparsity")
        axes.xaxis.get_major_locator().set_params(integer=True)
        _percent(axes.yaxis)
        _legend(figure, axes)
    return written


def plot_row_sparsity(rows: Mapping[str, Sequence[float]], path: str | Path) -> list[Path]:
    """Heat map of the rows' sparsities: one line per projection, from the weight's first row at the left to its last.

    Args:
        rows: projection's name -> shares of zeros in [0, 1], one per row of its weight. A line has 64 cells; each is
            the mean of its share of the rows, so that projections of any size compare.
        path (`str` or `Path`): where to write, without a suffix.

    Returns and raises as [`plot_perplexity_by_seconds`]; `ValueError` also for shares outside [0, 1].
    """
    _check_shares(rows)
    cells = np.stack([_binned(np.asarray(shares, dtype=np.float64)) for shares in rows.values()])
    low, high = cells.min(), cells.max()
    spare = 0.005 if low == high else 0.0  # a scale needs an extent
    height = max(2.4, 1.4 + min(0.2 * len(rows), 13))
    with _figure(path, height) as (figure, written):
        axes = figure.subplots()
        axes.grid(False)
        options = {"interpolation": "nearest", "aspect": "auto", "extent": (0, 1, len(rows), 0)}
        image = axes.imshow(cells, cmap="viridis", vmin=low - spare, vmax=high + spare, **options)
        places, names = _row_names(list(rows))
        axes.hlines(places[1:-1], 0, 1, color="white", lw=0.6)
        axes.set_yticks([(start + stop) / 2 for start, stop in zip(places, places[1:])], names)
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel(f"Position of the row in the weight (means of {BINS} bins)")
        _percent(axes.xaxis)
        ticks = np.linspace(low - spare, high + spare, 5)
        bar = figure.colorbar(image, ax=axes, ticks=ticks, aspect=4 * height, pad=0.02, label="Row sparsity")
        bar.outline.set_visible(False)
        _percent(bar.ax.yaxis, digits=3)
    return written


def plot_comparison(comparison, directory: str | Path) -> list[Path]:
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


def _stem(name: str) -> str:
    """A name as part of a file's, without points, which begin a suffix."""
    return re.sub(r"[^\w-]+", "_", name).strip("_")


def _plot_lambdas(results: Sequence, path: Path) -> list[Path]:
    """Perplexity by lambda of the block step, from results with a single lambda each, if there are enough."""
    block_only = [r for r in results if r.block_lambda is not None and r.row_lambda is None and r.perplexity]
    chosen = next((r.block_lambda for r in block_only if len(r.decisions["block"]["candidates"]) > 1), None)
    curve = {
        r.block_lambda: math.exp(math.fsum(map(math.log, r.perplexity.values())) / len(r.perplexity))
        for r in block_only
    }
    if chosen is None or len(curve) < 3:
        return []
    return plot_lambda_curve(list(curve.items()), chosen, path, "perplexity")


@contextmanager
def _figure(path: str | Path, height: float) -> Iterator[tuple[Any, list[Path]]]:
    """An empty figure; at the end it is written, and the list holds its two files. Nothing global stays changed.

    Args:
        path (`str` or `Path`): where to write, without a suffix.
        height (`float`): in inches.
    """
    path = Path(path)
    if path.suffix and not path.suffix[1:].isdigit():  # "wanda-0.7" has none
        raise ValueError(
            f"The path {str(path)!r} ends in {path.suffix!r}: leave it out, since .png and .svg are added."
        )
    if not path.parent.is_dir():
        raise ValueError(f"The folder {str(path.parent)!r} does not exist: make it first.")
    check_matplotlib()
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    written: list[Path] = []
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # whatever the user's own settings are
        matplotlib.rcParams.update(STYLE)
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        FigureCanvasAgg(figure)
        yield figure, written
        # Without the date and the version, so that equal data give equal files.
        for suffix, unwanted in ((".png", ("Software",)), (".svg", ("Date", "Creator"))):
            target = path.with_name(path.name + suffix)
            figure.savefig(target, metadata=dict.fromkeys(unwanted))
            written.append(target)


def _name(run: Mapping[str, Any]) -> str:
    return f"{run['saliency']} + {run['topup']}"


def _point(run: Mapping[str, Any]) -> tuple[float, float]:
    """Seconds and perplexity of one run."""
    name = f"{_name(run)} at {run['sparsity']:g}"
    seconds = (run.get("allocation_seconds") or 0.0) + (run.get("pruning_seconds") or 0.0)
    if not seconds > 0:
        raise ValueError(f"The run {name} took {seconds} seconds, but a log axis needs more than 0.")
    values = list(run["perplexity"].values())
    if not all(value >= 1 for value in values):
        raise ValueError(f"The run {name} has the perplexities {values}, but a perplexity is at least 1.")
    return seconds, math.exp(sum(map(math.log, values)) / len(values))


def _assign(styles: Sequence, names: Sequence[str]) -> dict:
    """A style for each name, in alphabetical order; they repeat if there are not enough."""
    return {name: styles[index % len(styles)] for index, name in enumerate(sorted(set(names)))}


def _check_shares(series: Mapping[str, Sequence[float]]) -> None:
    if not series:
        raise ValueError("There is nothing to draw: give at least one series of sparsities.")
    for name, shares in series.items():
        if len(shares) == 0:
            raise ValueError(f"{name!r} has no sparsities.")
        if not all(0 <= share <= 1 for share in shares):
            raise ValueError(f"{name!r} has sparsities outside [0, 1].")


def _binned(shares: np.ndarray) -> np.ndarray:
    """Means of `BINS` bins of equal width, float64 of shape (BINS,); fewer rows than bins are repeated."""
    edges = np.arange(BINS + 1) * len(shares) / BINS
    starts = np.floor(edges[:-1]).astype(int)
    stops = np.maximum(np.ceil(edges[1:]).astype(int), starts + 1)
    return np.array([shares[start:stop].mean() for start, stop in zip(starts, stops)])


def _row_names(names: list[str]) -> tuple[list[int], list[str]]:
    """Where the heat map's named groups of lines begin, with the end of the last, and what they are called.

    A group is one projection or, if they are many, one block; if these are many as well, several.
    """
    if len(names) <= MAX_NAMES:
        return list(range(len(names) + 1)), _shortened(names)
    blocks = [match[1] if (match := re.search(r"\.(\d+)\.", name)) else name for name in names]
    starts = [index for index in range(len(names)) if index == 0 or blocks[index] != blocks[index - 1]]
    together = math.ceil(len(starts) / MAX_NAMES)
    ends = [starts[min(index + together, len(starts)) - 1] for index in range(0, len(starts), together)]
    starts = starts[::together]
    texts = [blocks[a] if a == b else f"{blocks[a]} to {blocks[b]}" for a, b in zip(starts, ends)]
    return [*starts, len(names)], [f"block {text}" if text[0].isdigit() else text for text in texts]


def _shortened(names: list[str]) -> list[str]:
    """Names without the parts that all of them begin with: "0.mlp.up_proj" of "model.layers.0.mlp.up_proj"."""
    parts = [name.split(".") for name in names]
    shared = 0
    while all(len(part) > shared + 2 for part in parts) and len({part[shared] for part in parts}) == 1:
        shared += 1
        if parts[0][shared].isdigit():  # the block's number is worth telling, even if it is the same in all
            break
    return [".".join(part[shared:]) for part in parts]


def _percent(axis, digits: int = 4) -> None:
    axis.set_major_formatter(lambda share, _: f"{100 * share:.{digits}g} %")


def _legend(figure, axes) -> None:
    """Below the axes, where no data can be, in as many columns as its longest name leaves room for.

    The figure becomes taller by it.
    """
    handles, labels = axes.get_legend_handles_labels()
    inches = 0.7 + 0.085 * max(map(len, labels))
    columns = max(1, min(len(labels), int(WIDTH / inches)))
    figure.set_figheight(figure.get_figheight() + 0.25 * math.ceil(len(labels) / columns))
    figure.legend(
        handles, labels, loc="outside lower center", ncols=columns, frameon=False, handlelength=3.5, borderaxespad=0.2
    )


def _label_log_axes(panels: Sequence) -> None:
    """Round numbers, written out: matplotlib's own are powers of ten, of which a narrow range has none."""
    for axis in [panels[0].xaxis, *(panel.yaxis for panel in panels)]:
        ticks = _log_ticks(*axis.get_view_interval())
        axis.set_ticks(ticks, [f"{tick:,.10g}" for tick in ticks])
        axis.set_ticks([], minor=True)


def _log_ticks(low: float, high: float) -> list[float]:
    """Three to ten round numbers between two positive ones, if there are any of two digits."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks: list[float] = []
    for factors in ((10,), (10, 30), (10, 20, 50), (10, 15, 20, 30, 50, 70), range(10, 100, 10), range(10, 100, 5),
                    range(10, 100, 2), range(10, 100)):  # fmt: skip
        ticks = [float(f"{factor}e{decade - 1}") for decade in decades for factor in factors]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) >= 3:
            break
    return ticks[:: math.ceil(len(ticks) / 10)] if ticks else [low, high]


def _label_points(figure, panels: Sequence) -> None:
    """Writes every point's name beside it, at the nearest place where it covers neither a point nor a name."""
    figure.draw_without_rendering()  # only now it is known where the points lie
    figure.set_layout_engine("none")
    renderer = figure.canvas.get_renderer()
    for panel in panels:
        inside = panel.get_window_extent(renderer).extents
        points = [(*panel.transData.transform(line.get_xydata()[0]), line.get_label()) for line in panel.lines]
        taken = [_around(x, y, 16, 16) for x, y, _ in points]
        # From left to right, so that the same points give the same figure in any order.
        for x, y, name in sorted(points):
            position = panel.transData.inverted().transform((x, y))
            style = {"arrowstyle": "-", "color": GREY, "lw": 0.8, "shrinkA": 0, "shrinkB": 5}
            label = panel.annotate(
                name, position, textcoords="data", fontsize="small", ha="center", va="center", arrowprops=style
            )
            extent = label.get_window_extent(renderer)
            # Of equal costs min takes the first place, which is the nearest.
            places = list(_places(x, y, extent.width + 4, extent.height + 2))
            far, box = min(places, key=lambda place: _overlap(place[1], taken, inside))
            taken.append(box)
            label.xyann = panel.transData.inverted().transform((box[:2] + box[2:]) / 2)
            label.arrow_patch.set_visible(far)


def _places(x: float, y: float, width: float, height: float) -> Iterator[tuple[bool, np.ndarray]]:
    """Boxes beside a point, the nearest first, and whether one is so far away that a line has to lead to it."""
    for distance in (10, 16, 24, 34, 46, 60, 80, 100):
        for turn in (0, 8, 4, 12, 2, 14, 6, 10, 1, 15, 7, 9, 3, 13, 5, 11):  # to the right and to the left first
            across, up = math.cos(turn * math.pi / 8), math.sin(turn * math.pi / 8)
            centre = x + across * (distance + width / 2), y + up * (distance + height / 2)
            yield distance > 16, _around(*centre, width, height)


def _around(x: float, y: float, width: float, height: float) -> np.ndarray:
    """A box by its centre: left, lower, right and upper edge."""
    return np.array([x - width / 2, y - height / 2, x + width / 2, y + height / 2])


def _overlap(box: np.ndarray, taken: list[np.ndarray], inside: np.ndarray) -> float:
    """Area that a box shares with others or has outside of the panel, in square pixels."""

    def shared(other: np.ndarray) -> float:
        sides = np.minimum(box[2:], other[2:]) - np.maximum(box[:2], other[:2])
        return float(sides.clip(0).prod())

    return sum(map(shared, taken)) + float((box[2:] - box[:2]).prod()) - shared(inside)
