"""The figure of docs/few_bits.md: perplexity against bits a weight, and against tokens per second, from its table of speed.

python -m benchmarks.few_bits_figure    # writes docs/figures/quality-by-speed.svg; nothing is measured
"""

import re
import shutil
import tempfile
from pathlib import Path

from benchmarks.figures import FOLDER, ROOT
from optimum_neuronal.comparing.figures.canvas import add_legend, add_title, new_figure
from optimum_neuronal.comparing.figures.styles import make_styles


PAGE = ROOT / "docs" / "few_bits.md"
NAME = "quality-by-speed"
COLUMNS = {"bits a weight": 1, "tokens per second": 3}  # of the table
PERPLEXITY = 2


def rows() -> dict[str, list[str]]:
    """First cell -> all cells of the first table behind the page's heading Speed."""
    section = PAGE.read_text(encoding="utf-8").partition("\n## Speed\n")[2]
    lines = re.search(r"(?:^\|.*\n)+", section, re.M)[0].splitlines()[2:]
    cells = ([cell.strip(" *") for cell in line.strip("|").split("|")] for line in lines)
    return {row[0]: row for row in cells}


def main() -> None:
    found = rows()
    styles = make_styles(found)
    with tempfile.TemporaryDirectory() as folder:
        with new_figure(Path(folder) / NAME, 3.6) as (figure, _):
            panels = figure.subplots(1, len(COLUMNS), sharey=True)
            for axes, (title, column) in zip(panels, COLUMNS.items()):
                points = []
                for name, row in found.items():
                    look = {"color": styles[name].colour, "marker": styles[name].marker, "ms": 9, "ls": "none"}
                    points += axes.plot([float(row[column])], [float(row[PERPLEXITY])], label=name, **look)
                axes.set(xlabel=title, xlim=(0, 1.08 * max(float(row[column]) for row in found.values())))
                axes.margins(y=0.15)
            panels[0].set_ylabel("perplexity (lower is better)")
            add_title(figure, "Perplexity of the demo's model; tokens per second of random weights of 1B shapes")
            add_legend(figure, points)
        shutil.copyfile(Path(folder) / f"{NAME}.svg", FOLDER / f"{NAME}.svg")


if __name__ == "__main__":
    main()
