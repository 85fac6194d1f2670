"""An example of every figure, and what is written in one."""

import itertools
import xml.etree.ElementTree as ElementTree

import numpy as np

from optimum_neuronal.evaluation.plots import (
    plot_block_sparsity,
    plot_lambda_curve,
    plot_perplexity_by_seconds,
    plot_row_sparsity,
)


METHODS = list(itertools.product(("magnitude", "wanda", "multiflow"), ("uniform", "owl", "neuronal")))


def run(saliency="wanda", topup="uniform", sparsity=0.7, perplexity=(20.0, 45.0), seconds=(1.0, 2.0), **more):
    perplexity = dict(zip(("wikitext2", "c4"), perplexity))
    values = {"saliency": saliency, "topup": topup, "sparsity": sparsity, "perplexity": perplexity}
    return values | {"allocation_seconds": seconds[0], "pruning_seconds": seconds[1]} | more


def runs(sparsities=(0.6, 0.7, 0.8)):
    """Close together, as real ones are."""
    return [
        run(*method, sparsity, (30 + index, 40 + index), (0.1 * index, 3.0))
        for sparsity in sparsities
        for index, method in enumerate(METHODS)
    ]


LAYER = {
    f"model.layers.{block}.{name}": [0.5 + 0.01 * block] * rows
    for block in range(4)
    for name, rows in (("self_attn.q_proj", 100), ("mlp.down_proj", 10))
}
DRAWN = {
    "perplexity": lambda path: plot_perplexity_by_seconds(runs(), path),
    "lambda": lambda path: plot_lambda_curve([(0.1, 1.5), (0.05, 2.0), (0.2, None)], 0.1, path, "Alignment error"),
    "blocks": lambda path: plot_block_sparsity({"uniform": [0.7] * 40, "neuronal": np.linspace(0.6, 0.8, 40)}, path),
    "rows": lambda path: plot_row_sparsity(LAYER, path),
}


def texts(paths):
    """What is written in a figure's SVG."""
    return ["".join(text.itertext()) for text in ElementTree.parse(paths[1]).iter("{http://www.w3.org/2000/svg}text")]
