"""Draw the figures of docs/concepts.md and docs/why.md from the tables of benchmarks/methods.md.

python -m benchmarks.figures    # writes docs/figures/*.svg; nothing is measured
"""

import re
from pathlib import Path

from optimum_neuronal.common.figure_style import add_legend, make_styles, new_figure, show_percent


ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "figures"
SPARSITIES = (0.6, 0.7, 0.8)
DRAWN = {  # saliency and top-up -> name in the legend
    ("wanda", "uniform"): "Wanda, uniform",
    ("wanda", "neuronal"): "Wanda, NeuronAL",
    ("wanda", "search"): "Wanda, search",
    ("sparsegpt", "search:levels=False"): "SparseGPT, search by its score",
    ("alps", "uniform"): "ALPS, uniform",
    ("alps", "search"): "ALPS, search",
}
STYLES = make_styles(DRAWN.values())
EXCESS = "ln(perplexity / dense perplexity)"


def excesses(model: str) -> dict[tuple[str, str], list[float]]:
    """Saliency and top-up -> excess at each of `SPARSITIES`, as benchmarks/methods.md has it of a model."""
    text = (ROOT / "benchmarks" / "methods.md").read_text(encoding="utf-8")
    found = {}
    for table in re.findall(rf"^## The {model} model, [^\n]*: excess\n\n(.*?)\n\n", text, re.M | re.S):
        head, _, *rows = ([cell.strip(" *") for cell in row.strip("|").split("|")] for row in table.splitlines())
        for topup, *values in rows:
            for column, value in zip(head[1:], values):
                saliency, percent = column.split()
                found[saliency, topup, percent] = float(value)
    return {key: [found[(*key, f"{share:.0%}")] for share in SPARSITIES] for key in DRAWN}


def draw(name: str, title: str, model: str, label: str, place) -> None:
    """One figure.

    Args:
        name (`str`): of the file.
        title (`str`): above it.
        model (`str`): `"demo"` or `"reference"`.
        label (`str`): of the horizontal axis.
        place: sparsity -> where it is drawn.
    """
    with new_figure(4.2, title) as (figure, files):
        axes = figure.subplots()
        lines = []
        for key, values in excesses(model).items():
            places = [place(share) for share in SPARSITIES]
            lines += axes.plot(places, values, label=DRAWN[key], **STYLES[DRAWN[key]])
        axes.set(xlabel=label, ylabel=EXCESS, ylim=(0, None))
        if place(SPARSITIES[0]) < 1:
            axes.set_xticks(SPARSITIES)
            show_percent(axes.xaxis)
        add_legend(figure, lines)
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{name}.svg").write_bytes(files[".svg"])


def main() -> None:
    title = "What a prune loses, {} model (benchmarks/methods.md)"
    for model in ("demo", "reference"):
        draw(f"quality-by-sparsity-{model}", title.format(model), model, "share of zeros", lambda share: share)
    bits = "bits a weight of the pruned projections, packed in bfloat16 (dense: 16)"
    draw("quality-by-bits", title.format("reference"), "reference", bits, lambda share: 16 * (1 - share) + 1)


if __name__ == "__main__":
    main()
