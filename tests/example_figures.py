"""An example of every figure, and what is written in one."""

import itertools
import tempfile
from pathlib import Path
from unittest.mock import patch

import numpy as np
from matplotlib.figure import Figure
from matplotlib.text import Text

from optimum_neuronal.comparing import figures
from optimum_neuronal.comparing.results import Result


METHODS = list(itertools.product(("magnitude", "wanda", "multiflow"), ("uniform", "owl", "neuronal")))
DENSE = Result(0.0, "dense", "dense", {"wikitext2": 20.0, "c4": 5.0})


def result(saliency="wanda", topup="uniform", sparsity=0.7, perplexity=(20.0, 45.0), seconds=(1.0, 2.0), **more):
    perplexity = dict(zip(("wikitext2", "c4"), perplexity))
    times = {"allocation_seconds": seconds[0], "pruning_seconds": seconds[1]}
    return Result(sparsity, saliency, topup, perplexity, **times, **{"block_sparsity": [sparsity] * 4, **more})


def results(sparsities=(0.6, 0.7, 0.8)):
    """Close together, as real ones are."""
    return [
        result(*method, sparsity, (30 + index, 40 + index), (0.1 * index, 3.0))
        for sparsity in sparsities
        for index, method in enumerate(METHODS)
    ]


def drawn(found, model="llama", dense=DENSE):
    """Return what is written in every figure of a comparison, by the name of its file. No pixels are drawn."""
    written = {}

    def savefig(figure, path):
        figure.draw_without_rendering()
        written[Path(path).stem] = [text.get_text() for text in figure.findobj(Text) if text.get_visible()]

    with patch.object(Figure, "savefig", savefig), tempfile.TemporaryDirectory() as folder:
        paths = figures.draw_figures(Path(folder), model, dense, found)
    assert [path.stem for path in paths] == list(written)
    return written


def by_seconds(found):
    return drawn(found)["perplexity-by-seconds"]


def by_block(shares):
    found = [result(topup=name, block_sparsity=list(values)) for name, values in shares.items()]
    return drawn(found)["block-sparsity-wanda-70"]


DRAWN = {
    "seconds": lambda: by_seconds(results((0.6, 0.7))),
    "blocks": lambda: by_block({"uniform": [0.7] * 40, "neuronal": np.linspace(0.6, 0.8, 40)}),
}
