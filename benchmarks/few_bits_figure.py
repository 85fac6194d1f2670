"""Draw the figure of docs/few_bits.md from its table of speed: perplexity by bits per weight and by tokens per second.

python -m benchmarks.few_bits_figure    # writes docs/figures/quality-by-speed.svg; nothing is measured
"""

import re

from benchmarks.figures import FOLDER, ROOT
from optimum_neuronal.common.figure_style import add_legend, make_styles, new_figure


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
    title = "Perplexity of the demo's model; tokens per second of random weights of 1B shapes"
    with new_figure(3.6, title) as (figure, files):
        panels = figure.subplots(1, len(COLUMNS), sharey=True)
        for axes, (label, column) in zip(panels, COLUMNS.items()):
            points = []
            for name, row in found.items():
                look = styles[name] | {"label": name, "ms": 9, "ls": "none"}
                points += axes.plot([float(row[column])], [float(row[PERPLEXITY])], **look)
            axes.set(xlabel=label, xlim=(0, 1.08 * max(float(row[column]) for row in found.values())))
            axes.margins(y=0.15)
        panels[0].set_ylabel("perplexity (lower is better)")
        add_legend(figure, points)
    (FOLDER / f"{NAME}.svg").write_bytes(files[".svg"])


if __name__ == "__main__":
    main()
