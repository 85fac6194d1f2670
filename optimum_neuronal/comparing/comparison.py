"""Outcome of a comparison of methods: results, the paper's aggregates, tables, figures and files."""

import base64
import csv
import html
import io
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from ..common.display import Column, Table, format_html, format_markdown, format_table
from ..files.atomic import write_atomically
from ..files.directories import check_writable
from .figures import KINDS, draw_figures
from .results import DENSE, Aggregate, Result, geometric_mean, grouped


JSON, CSV, PAGE = TABLES = ("comparison.json", "comparison.csv", "comparison.md")
FIGURES = tuple(f"{name}*.{suffix}" for name in KINDS for suffix in ("png", "svg"))
OVER_ALL = "Over all saliencies (geometric mean)"


def check_output(directory: str | Path, overwrite: bool, names: Sequence[str] = TABLES) -> Path:
    """Raise `FileExistsError` before long work if a file with one of these names exists; create nothing.

    A directory with the `comparison.json` of a comparison is continued: its tables and figures may be written anew.

    Args:
        directory (`str` or `Path`): need not exist; [`check_writable`] has the further errors.
        overwrite (`bool`): True permits to replace every file.
        names (`Sequence[str]`): patterns of `Path.glob`.
    """
    folder = check_writable(directory, "write tables to")
    with suppress(OSError, ValueError):
        content = json.loads((folder / JSON).read_text(encoding="utf-8"))
        if isinstance(content, dict) and content.keys() >= {"model", "dense", "results", "aggregates"}:
            return folder
    for path in sorted(path for name in names for path in folder.glob(name)):
        if not overwrite:
            raise FileExistsError(
                f"{Path(directory) / path.name} was not written by a comparison: rename it, or choose another directory; "
                "or overwrite it (overwrite=True, --overwrite), which also runs again what is finished there."
            )
    return folder


@dataclass(frozen=True, repr=False)
class Figures:
    """Figures of a comparison; a notebook shows them. There are no paths if the figures were not written."""

    images: dict[str, bytes]  # name -> PNG
    paths: list[Path]  # .png and .svg files

    def __repr__(self) -> str:
        return f"Figures({', '.join(self.images)})"

    def _repr_html_(self) -> str:
        tag = '<img alt="{}" width="800" src="data:image/png;base64,{}"/>'
        images = {html.escape(name): base64.b64encode(image).decode() for name, image in self.images.items()}
        return "\n".join(tag.format(*image) for image in images.items())


@dataclass(repr=False)
class Comparison:
    """Outcome of [`compare`]. `print(comparison)` shows tables, `comparison.plot()` figures.

    Args:
        model (`str`): name of the pruned model.
        dense (`Result`): figures of the dense model.
        results (`list[Result]`): one per combination, by sparsity, saliency, top-up, preset and bits in the order asked for.
        calibration (`dict`): source, number and length of the sequences, seed.
        versions (`dict`): of this package, transformers, torch and Python.
    """

    model: str
    dense: Result
    results: list[Result]
    calibration: dict[str, Any]
    versions: dict[str, str]

    @property
    def failed(self) -> list[Result]:
        """Results with an error in place of figures."""
        return [result for result in self.results if result.error is not None]

    def aggregates(self) -> list[Aggregate]:
        """Return one aggregate for each sparsity and top-up or preset, and for each budget of bits, in their order."""
        found = []
        for (sparsity, topup, budget), members in grouped(self.results, "sparsity", "label", "budget").items():
            members = [result for result in members if result.error is None]
            factors = [r.perplexity[name] / self.dense.perplexity[name] for r in members for name in r.perplexity]
            retained = [r.mean_accuracy / self.dense.mean_accuracy for r in members if self.dense.mean_accuracy]
            means = geometric_mean(factors), geometric_mean(retained)
            found.append(Aggregate(sparsity, topup, *means, len(members), budget))
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return everything, with the aggregates, JSON-serialisable."""
        return {**asdict(self), "aggregates": [asdict(aggregate) for aggregate in self.aggregates()]}

    def table(self) -> Table:
        """Return the main table: one row per combination below the dense model's row.

        The best of every sparsity is marked. The columns of bits and of the rotation's seconds are left out if no result has any.
        """
        shown = [self.dense, *self.results]
        columns = [
            Column("sparsity", [r.sparsity if r.error else r.achieved_sparsity for r in shown], "{:.2%}".format),
            Column("saliency", [r.saliency for r in shown]),
            Column("top-up", [None if r.saliency == DENSE else r.topup for r in shown]),
        ]
        if any(r.bits_per_weight is not None for r in shown):
            columns.append(Column("bits a weight", [r.bits_per_weight for r in shown], "{:.2f}".format))
        for name in self.dense.perplexity:
            columns.append(Column(f"perplexity {name}", [r.perplexity.get(name) for r in shown], _short, min))
        most_accurate = partial(max, key=itemgetter("accuracy"))
        for name in self.dense.accuracy:
            columns.append(Column(name, [r.accuracy.get(name) for r in shown], _with_error, most_accurate))
        if self.dense.accuracy:
            columns.append(Column("mean accuracy", [r.mean_accuracy for r in shown], "{:.2%}".format, max))
        costs = {"rotation s": lambda r: f"{r.rotation_seconds:.1f}"} if any(r.rotation_seconds for r in shown) else {}
        costs |= {
            "allocation s": lambda r: f"{r.allocation_seconds:.1f}",
            "pruning s": lambda r: f"{r.pruning_seconds:.1f}",
            "peak GB": lambda r: f"{max(r.peak_memory.values(), default=0) / 1e9:.2f}",
        }
        for title, text in costs.items():
            columns.append(Column(title, ["-" if r.error else "" if r.saliency == DENSE else text(r) for r in shown]))
        lambdas = [[f"{value:g}" for value in (r.block_lambda, r.row_lambda) if value is not None] for r in shown]
        texts = [f"failed: {r.error}" if r.error else " / ".join(own) for r, own in zip(shown, lambdas)]
        columns.append(Column("lambda block / row", texts))
        return Table.of(columns, [None, *((r.sparsity, r.budget) for r in self.results)])

    def aggregate_table(self) -> Table:
        """Return a table with a row per top-up or preset and a column per sparsity or budget, and aggregate; the best is marked."""
        aggregates = self.aggregates()
        topups = list(dict.fromkeys(entry.topup for entry in aggregates))
        found = {(entry.topup, entry.sparsity, entry.budget): entry for entry in aggregates}
        measures: list[tuple] = [("perplexity x dense", "perplexity_factor", _short, min)]
        if self.dense.accuracy:
            measures.append(("accuracy retained", "accuracy_retention", "{:.1%}".format, max))
        columns = [Column("top-up", topups)]
        for title, attribute, text, best in measures:
            for sparsity, budget in dict.fromkeys((entry.sparsity, entry.budget) for entry in aggregates):
                # None while the comparison runs, or if all combinations failed
                values = [getattr(found.get((topup, sparsity, budget)), attribute, None) for topup in topups]
                asked = f"{sparsity:.0%}" if budget is None else f"{budget:g} bits"
                columns.append(Column(f"{title}, {asked}", values, text, best))
        return Table.of(columns, ["all"] * len(topups))

    def __str__(self) -> str:
        return f"{format_table(*self.table()[:2])}\n\n{format_table(*self.aggregate_table()[:2])}"

    def __repr__(self) -> str:
        failed = f", {len(self.failed)} failed" if self.failed else ""
        return f"Comparison({self.model}, {len(self.results)} combinations{failed})"

    def _repr_html_(self) -> str:
        tables = f"{format_html(*self.table())}\n<p>{OVER_ALL}:</p>\n{format_html(*self.aggregate_table())}"
        return f"<p><b>{html.escape(self.model)}</b></p>\n{tables}"

    def to_markdown(self, figures: Sequence[str] = ()) -> str:
        """Return both tables in Markdown, with the calibration data, and named figures in the same folder."""
        parts = [f"# {self.model}"]
        if self.calibration:
            parts.append("Calibration: {num_samples} x {seq_length} tokens of {source}.".format(**self.calibration))
        parts += [format_markdown(*self.table()), f"{OVER_ALL}:", format_markdown(*self.aggregate_table())]
        parts += [f"![{name}]({name}.png)" for name in figures]
        return "\n\n".join(parts) + "\n"

    def to_csv(self) -> str:
        """Return the main table as CSV, one line per combination, in full precision."""
        columns = ["saliency", "topup", "sparsity", "achieved_sparsity", "allocation_seconds", "pruning_seconds"]
        columns += ["rotation_seconds", "block_lambda", "row_lambda", "budget", "bits_per_weight", "error"]
        rows = []
        for result in [self.dense, *self.results]:
            row = {column: getattr(result, column) for column in columns}
            row["peak_memory"] = max(result.peak_memory.values(), default=None)
            row |= {f"perplexity {name}": result.perplexity.get(name) for name in self.dense.perplexity}
            for kind in ("accuracy", "stderr"):
                row |= {f"{kind} {name}": result.accuracy.get(name, {}).get(kind) for name in self.dense.accuracy}
            rows.append(row)
        text = io.StringIO()
        writer = csv.DictWriter(text, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue()

    def save(self, directory: str | Path, overwrite: bool = False) -> list[Path]:
        """Write `comparison.json`, `.csv` and `.md` into a directory, which is made if need be; return their paths.

        An earlier comparison there is replaced. [`check_output`] has the arguments and errors.
        """
        contents = (json.dumps(self.to_dict(), indent=2) + "\n", self.to_csv(), self.to_markdown())
        files = {name: content.encode() for name, content in zip(TABLES, contents)}
        return _write(check_output(directory, overwrite), files)

    def plot(self, directory: str | Path | None = None, overwrite: bool = False) -> Figures:
        """Draw all figures that the results allow, see [`draw_figures`]; a notebook shows them.

        Args:
            directory (`str` or `Path`, *optional*):
                Folder for .png and .svg files, which is made if need be. A `comparison.md` that [`save`] wrote there
                shows the figures too. None: nothing is written.
            overwrite (`bool`): True permits to replace figures that no comparison wrote.

        Raises:
            `ImportError`, `FileExistsError`: matplotlib is not installed; [`check_output`] has the other.
        """
        if directory is not None:
            check_output(directory, overwrite, FIGURES)
        drawn = draw_figures(self.model, self.dense, self.results)
        images = {name: files[".png"] for name, files in drawn.items()}
        if directory is None:
            return Figures(images, [])
        contents = {f"{name}{kind}": content for name, files in drawn.items() for kind, content in files.items()}
        paths = _write(Path(directory), contents)
        page = Path(directory) / PAGE
        if page.is_file() and page.read_text(encoding="utf-8") == self.to_markdown():
            write_atomically(page, self.to_markdown(list(images)).encode())
        return Figures(images, paths)


def _write(folder: Path, contents: Mapping[str, bytes]) -> list[Path]:
    """Write files, name -> content, into a folder, which is made if need be, and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        write_atomically(folder / name, content)
    return [folder / name for name in contents]


def _short(value: float) -> str:
    """Return a perplexity or a factor with two decimals, as a power of ten from 10,000."""
    return f"{value:.2f}" if value < 10000 else f"{value:.2e}"


def _with_error(task: Mapping[str, Any]) -> str:
    """Return a task's accuracy with its standard error, if there is one: `"60.00% ± 1.00%"`."""
    return f"{task['accuracy']:.2%}" + ("" if task["stderr"] is None else f" ± {task['stderr']:.2%}")
