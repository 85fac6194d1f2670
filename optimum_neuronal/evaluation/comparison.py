"""The outcome of a comparison of methods: results, the paper's aggregates, tables, figures and files."""

import html
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..runtime.durable import write_durably
from ..runtime.tables import format_html, format_markdown, format_table
from .averages import geometric_mean
from .comparison_tables import Table, aggregate_table, combination_table, to_csv
from .figures.shown import Figures
from .plots import plot_results
from .results import Aggregate, Result


NAME = "comparison"
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

    def plot(self, directory: str | Path | None = None) -> Figures:
        """Draws all figures that the results allow, see [`plot_results`]; a notebook shows them.

        Args:
            directory (`str` or `Path`, *optional*):
                An existing folder to write them to, as .png and .svg; the `comparison.md` that [`save`] wrote there
                gets them as well. None: they are only shown.

        Raises:
            `ImportError`: matplotlib is not installed.
        """
        if directory is None:
            with tempfile.TemporaryDirectory() as folder:
                return Figures.read(plot_results(self.model, self.dense, self.results, folder), kept=False)
        figures = Figures.read(plot_results(self.model, self.dense, self.results, directory))
        page = Path(directory) / f"{NAME}.md"
        if page.is_file() and page.read_text(encoding="utf-8").startswith(self.to_markdown()):  # written by `save`
            write_durably(page, self.to_markdown(figures).encode())
        return figures

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

    def save(self, directory: str | Path) -> list[Path]:
        """Writes `comparison.json`, `.csv` and `.md` into an existing directory and returns their paths."""
        content = {
            ".json": json.dumps(self.to_dict(), indent=2) + "\n",
            ".csv": self.to_csv(),
            ".md": self.to_markdown(),
        }
        paths = []
        for suffix, text in content.items():
            paths.append(Path(directory) / f"{NAME}{suffix}")
            write_durably(paths[-1], text.encode())
        return paths
