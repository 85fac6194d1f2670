"""The outcome of a comparison of methods: results, the paper's aggregates, tables, figures and files."""

import html
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..display import format_html, format_markdown, format_table
from .averages import geometric_mean
from .comparison_tables import Table, aggregate_table, combination_table, to_csv
from .figures.shown import Figures
from .plots import plot_results
from .results import Aggregate, Result
from .written_files import WrittenFiles


NAME = "comparison"
PAGE = f"{NAME}.md"
TABLES = (f"{NAME}.json", f"{NAME}.csv", PAGE)
OVER_ALL = "Over all saliencies (geometric mean)"


@dataclass(repr=False)
class Comparison:
    """What [`compare`] found. `print(comparison)` shows it as tables, `comparison.plot()` as figures.

    Args:
        model (`str`): what was pruned.
        dense (`Result`): the dense model's figures.
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
        """The results that are an error instead of figures."""
        return [result for result in self.results if result.error is not None]

    def aggregates(self) -> list[Aggregate]:
        """One aggregate for each sparsity, top-up and number of bits, in their order."""
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
        """All that was found, with the aggregates, JSON-serialisable."""
        return {**asdict(self), "aggregates": [asdict(aggregate) for aggregate in self.aggregates()]}

    def table(self) -> Table:
        """The main table: one row per combination."""
        return combination_table(self.dense, self.results)

    def aggregate_table(self) -> Table:
        """The table of the aggregates: one row per top-up."""
        return aggregate_table(self.aggregates(), with_tasks=bool(self.dense.accuracy))

    def plot(self, directory: str | Path | None = None, overwrite: bool = False) -> Figures:
        """Draws all figures that the results allow, see [`plot_results`]; a notebook shows them.

        Args:
            directory (`str` or `Path`, *optional*):
                A folder to write them to, as .png and .svg, which is made if need be; the `comparison.md` that
                [`save`] wrote there gets them as well. None: they are only shown.
            overwrite (`bool`): as for [`save`].

        Raises:
            `ImportError`: matplotlib is not installed.
            `FileExistsError`: as [`save`].
        """
        with tempfile.TemporaryDirectory() as folder:
            drawn = plot_results(self.model, self.dense, self.results, folder)
            figures = Figures.read(drawn)
            contents = {path.name: path.read_bytes() for path in drawn}
        if directory is None:
            return figures
        files = WrittenFiles(directory, overwrite)
        paths = files.write(contents)
        page = Path(directory) / PAGE
        if page.is_file() and files.is_free(PAGE) and page.read_text(encoding="utf-8").startswith(self.to_markdown()):
            files.write({PAGE: self.to_markdown(figures).encode()})
        return replace(figures, paths=paths)

    def __str__(self) -> str:
        return f"{format_table(*self.table()[:2])}\n\n{format_table(*self.aggregate_table()[:2])}"

    def __repr__(self) -> str:
        failed = f", {len(self.failed)} failed" if self.failed else ""
        return f"Comparison({self.model}, {len(self.results)} combinations{failed})"

    def _repr_html_(self) -> str:
        tables = f"{format_html(*self.table())}\n<p>{OVER_ALL}:</p>\n{format_html(*self.aggregate_table())}"
        return f"<p><b>{html.escape(self.model)}</b></p>\n{tables}"

    def to_markdown(self, figures: Figures | None = None) -> str:
        """Both tables in Markdown, with what they were measured on, and figures that lie in the same folder."""
        parts = [f"# {self.model}"]
        if self.calibration:
            parts.append("Calibration: {num_samples} x {seq_length} tokens of {source}.".format(**self.calibration))
        parts += [format_markdown(*self.table()), f"{OVER_ALL}:", format_markdown(*self.aggregate_table())]
        parts += [f"![{name}]({name}.png)" for name in (figures.images if figures else ())]
        return "\n\n".join(parts) + "\n"

    def to_csv(self) -> str:
        """The table as CSV, one line per combination, in full precision."""
        return to_csv(self.dense, self.results)

    def save(self, directory: str | Path, overwrite: bool = False) -> list[Path]:
        """Writes `comparison.json`, `.csv` and `.md` into a directory and returns their paths.

        Args:
            directory (`str` or `Path`): where to; it is made if need be.
            overwrite (`bool`): whether files of these names may be replaced that are not as a comparison wrote them.

        Raises:
            `FileExistsError`: there is such a file, and it may not.
        """
        contents = (json.dumps(self.to_dict(), indent=2) + "\n", self.to_csv(), self.to_markdown())
        files = WrittenFiles(directory, overwrite)
        return files.write({name: content.encode() for name, content in zip(TABLES, contents)})
