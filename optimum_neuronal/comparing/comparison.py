"""Outcome of a comparison of methods: its results, with tables, figures and files."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..common.display import format_latex, format_markdown, format_table
from ..files.output import check_writable, write_atomically
from ..report import calibration_text
from .figures import draw_figures
from .results import Aggregate, Result, aggregate
from .tables import aggregate_caption, aggregate_table, result_table


JSON, PAGE, LATEX = TABLES = ("comparison.json", "comparison.md", "comparison.tex")
MEANS_PAGE = "means.md"
FAR_ABOVE = 1.5  # times the perplexity of uniform sparsity


def check_tables_directory(directory: str | Path, overwrite: bool, model: str | None = None) -> Path:
    """Return a directory for tables. Raise `FileExistsError` for tables of another `model`, or that no comparison wrote."""
    folder = check_writable(directory, "write tables to")
    if overwrite or not any((folder / name).exists() for name in TABLES):
        return folder
    whose = None
    with suppress(OSError, ValueError):
        whose = Comparison.load(folder).model
        if model in (None, whose):
            return folder
    raise FileExistsError(
        f"{folder} holds tables of {whose or 'something else than a comparison'}: choose another directory, or overwrite "
        "them (overwrite=True, --overwrite)."
    )


@dataclass(repr=False)
class Comparison:
    """Outcome of [`compare`]. `print(comparison)` shows tables, `comparison.plot(directory)` draws figures."""

    model: str  # name of the pruned model
    dense: Result  # figures of the dense model
    results: list[Result]  # one per combination, and with a sweep per combination and setting
    calibration: dict[str, Any]  # source, number and length of the sequences, seed; without what differs
    versions: dict[str, str]  # of this package, transformers, torch and Python
    # Test set -> number of windows, tokens in each, True if they begin with the BOS token.
    windows: dict[str, tuple[int, int, bool]] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)  # fields that all combinations were given
    accuracy_over: Sequence[str] | None = None  # saliencies of AccRet, see [`aggregate`]

    @classmethod
    def load(cls, directory: str | Path) -> "Comparison":
        """Read the `comparison.json` of a directory. Raise `ValueError` if no comparison wrote it."""
        path = Path(directory) / JSON
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            del content["aggregates"]
            results = [Result(**result) for result in content["results"]]
            return cls(**content | {"dense": Result(**content["dense"]), "results": results})
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ValueError(f"{path} was not written by a comparison: {error}") from error

    @property
    def measures(self) -> tuple[list[str], list[str], list[str]]:
        """Names of the test sets and tasks, and the saliencies of AccRet."""
        return sorted(self.dense.perplexity), sorted(self.dense.accuracy), sorted(self.accuracy_over or ())

    @property
    def failed(self) -> list[Result]:
        return [result for result in self.results if result.error is not None]

    def aggregates(self) -> list[Aggregate]:
        """Return an aggregate over the saliencies for each sparsity and top-up or preset."""
        return aggregate([(self.dense, self.results)], self.accuracy_over)

    def notes(self) -> list[str]:
        """Return what the figures were measured on, in sentences."""
        notes, swept = [], {}
        for result in self.results:
            for name, value in result.setting.items():
                swept.setdefault(name, {})[str(value)] = None
        if self.calibration:
            differing = dict.fromkeys(("num_samples", "seq_length", "source"), "several")
            notes.append(f"Calibration: {calibration_text(differing | self.calibration)}.")
        given = {name: value for name, value in self.config.items() if name not in {*self.calibration, *swept}}
        if given:
            notes.append(f"All with {', '.join(f'{name}={value!r}' for name, value in given.items())}.")
        notes += [
            f"Means over {name} {', '.join(values)}, ± the standard deviation." for name, values in swept.items()
        ]
        if self.windows:
            tests = [
                f"{name} ({count} x {tokens} tokens{', BOS first' if bos else ''})"
                for name, (count, tokens, bos) in self.windows.items()
            ]
            notes.append(f"Perplexity: {', '.join(tests)}.")
        if self.dense.accuracy:
            asked = [f"{name} ({task['samples']} questions)" for name, task in self.dense.accuracy.items()]
            error = "" if swept else ", ± the standard error"
            notes.append(f"Zero-shot accuracy{error}: {', '.join(asked)}.")
        for one in self.aggregates():
            if one.improvement is not None and one.improvement < 1 - FAR_ABOVE:
                times = f"{1 - one.improvement:,.1f} times the perplexity of uniform sparsity"
                notes.append(f"Warning: {one.topup} at {100 * one.sparsity:.4g}% has {times}, on average.")
        return notes

    def __repr__(self) -> str:
        return self._shown(lambda header, rows, bold: format_table(header, rows))

    def to_markdown(self) -> str:
        """Return both tables in Markdown, with what they were measured on and the versions."""
        made_by = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return f"# {self.model}\n\n{self._shown(format_markdown)}\n\nVersions: {made_by}.\n"

    def to_latex(self) -> str:
        """Return both tables in LaTeX (booktabs), with what they were measured on as comments."""
        return self._shown(format_latex, note="% {}".format) + "\n"

    def _shown(self, show: Callable[..., str], note: Callable[[str], str] = str) -> str:
        means, table = self.aggregates(), show(*result_table(self.dense, self.results))
        caption = note(aggregate_caption(means))
        return "\n\n".join([*map(note, self.notes()), table, caption, show(*aggregate_table(means))])

    def save(self, directory: str | Path, overwrite: bool = False) -> None:
        """Write `comparison.json`, `.md` and `.tex` into a directory, see [`check_tables_directory`]."""
        folder = check_tables_directory(directory, overwrite, self.model)
        folder.mkdir(parents=True, exist_ok=True)
        values = {**asdict(self), "aggregates": [asdict(one) for one in self.aggregates()]}
        write_atomically(folder / JSON, f"{json.dumps(values, indent=2)}\n".encode())
        write_atomically(folder / PAGE, self.to_markdown().encode())
        write_atomically(folder / LATEX, self.to_latex().encode())

    def plot(self, directory: str | Path, lines: Sequence[str] = ()) -> list[Path]:
        """Draw all figures that the results allow into a directory; return their paths.

        A figure has at most eight lines: the `lines` that are named, such as `"wanda+owl"`, and the best.
        """
        return draw_figures(Path(directory), self.model, self.dense, self.results, lines)


def merge(directories: Sequence[str | Path], output: str | Path) -> str:
    """Write AccRet and PPLFac over finished comparisons of several models to `means.md` in a directory, and return them."""
    page = check_writable(output, "write means to") / MEANS_PAGE
    if page.exists():
        raise FileExistsError(f"{page} exists: choose another directory.")
    comparisons = [Comparison.load(directory) for directory in directories]
    first = comparisons[0]
    for one in comparisons[1:]:
        if one.measures != first.measures:
            raise ValueError(
                f"The comparisons of {first.model} and {one.model} have different test sets, tasks or saliencies of AccRet, "
                f"{first.measures} and {one.measures}: measure both on the same."
            )
    means = aggregate(((one.dense, one.results) for one in comparisons), first.accuracy_over)
    notes = [f"{one.model}: {' '.join(one.notes())}" for one in comparisons]
    text = "\n\n".join([*notes, aggregate_caption(means), format_markdown(*aggregate_table(means))])
    page.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(page, f"# {', '.join(one.model for one in comparisons)}\n\n{text}\n".encode(), is_new=True)
    return text
