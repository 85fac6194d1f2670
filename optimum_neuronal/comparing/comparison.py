"""Outcome of a comparison of methods: results, the paper's aggregates, tables, figures and files."""

import base64
import html
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..display import format_html, format_markdown, format_table
from ..files.atomic import write_durably
from ..files.directories import check_writable
from .figures import KINDS, draw_figures
from .results import Aggregate, Result, geometric_mean
from .tables import Table, aggregate_table, combination_table, to_csv


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
    if overwrite or _holds_comparison(folder):
        return folder
    for path in sorted(path for name in names for path in folder.glob(name)):
        raise FileExistsError(
            f"{Path(directory) / path.name} was not written by a comparison: rename it, or choose another directory; or "
            "overwrite it (overwrite=True, --overwrite), which also runs again what is finished there."
        )
    return folder


def _holds_comparison(folder: Path) -> bool:
    """Return True if the directory has a `comparison.json` that a comparison wrote."""
    with suppress(OSError, ValueError):
        content = json.loads((folder / JSON).read_text(encoding="utf-8"))
        return isinstance(content, dict) and content.keys() >= {"model", "dense", "results", "aggregates"}
    return False


@dataclass(frozen=True, repr=False)
class Figures:
    """Figures of a comparison; a notebook shows them.

    Args:
        images (`dict[str, bytes]`): name -> PNG.
        paths (`list[Path]`): the files, .png and .svg; empty if the figures were not written.
    """

    images: dict[str, bytes]
    paths: list[Path]

    def __repr__(self) -> str:
        return f"Figures({', '.join(self.images)})"

    def _repr_html_(self) -> str:
        return "\n".join(
            f'<img alt="{html.escape(name)}" width="800" src="data:image/png;base64,{base64.b64encode(image).decode()}"/>'
            for name, image in self.images.items()
        )


@dataclass(repr=False)
class Comparison:
    """Outcome of [`compare`]. `print(comparison)` shows tables, `comparison.plot()` figures.

    Args:
        model (`str`): name of the pruned model.
        dense (`Result`): figures of the dense model.
        results (`list[Result]`): one per combination, by sparsity, saliency, top-up and bits in the order asked for.
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
        """Return one aggregate for each sparsity, top-up and number of bits, in their order."""
        groups: dict[tuple[float, str, int | None], list[Result]] = {}
        for result in self.results:
            members = groups.setdefault((result.sparsity, result.topup, result.value_bits), [])
            if result.error is None:
                members.append(result)
        return [self._aggregate(*key, results) for key, results in groups.items()]

    def _aggregate(self, sparsity: float, topup: str, value_bits: int | None, results: Sequence[Result]) -> Aggregate:
        factors = [r.perplexity[name] / self.dense.perplexity[name] for r in results for name in r.perplexity]
        retained = [r.mean_accuracy / self.dense.mean_accuracy for r in results if self.dense.mean_accuracy]
        means = geometric_mean(factors), geometric_mean(retained)
        return Aggregate(sparsity, topup, *means, len(results), value_bits)

    def to_dict(self) -> dict[str, Any]:
        """Return everything, with the aggregates, JSON-serialisable."""
        return {**asdict(self), "aggregates": [asdict(aggregate) for aggregate in self.aggregates()]}

    def table(self) -> Table:
        """Return the main table: one row per combination."""
        return combination_table(self.dense, self.results)

    def aggregate_table(self) -> Table:
        """Return the table of the aggregates: one row per top-up."""
        return aggregate_table(self.aggregates(), with_tasks=bool(self.dense.accuracy))

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
        return to_csv(self.dense, self.results)

    def save(self, directory: str | Path, overwrite: bool = False) -> list[Path]:
        """Write `comparison.json`, `.csv` and `.md` into a directory, which is made if need be; return their paths.

        Args:
            directory (`str` or `Path`): a new one, or one with an earlier comparison, whose tables are replaced.
            overwrite (`bool`): True permits to replace files of these names that no comparison wrote.

        Raises:
            `FileExistsError`: there is a file that no comparison wrote.
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
            overwrite (`bool`): as for [`save`].

        Raises:
            `ImportError`: matplotlib is not installed.
            `FileExistsError`: there is a file that no comparison wrote.
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
            write_durably(page, self.to_markdown(list(images)).encode())
        return Figures(images, paths)


def _write(folder: Path, contents: Mapping[str, bytes]) -> list[Path]:
    """Write files, name -> content, into a folder, which is made if need be, and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        write_durably(folder / name, content)
    return [folder / name for name in contents]
