"""An example of every figure, and what is written in one."""

import itertools
import xml.etree.ElementTree as ElementTree

import numpy as np

from optimum_neuronal.common.figure_style import make_styles
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


def results_with_bits(topups=("uniform", "search")):
    sparse = [
        result("alps", topup, sparsity, (30 + 9 * index, 51), bits_per_weight=1 + 16 * (1 - sparsity))
        for sparsity in (0.5, 0.6)
        for index, topup in enumerate(topups)
    ]
    quantized = {"saliency": "quantized", "topup": "rates", "sparsity": 0.0}
    return sparse + [
        result(**quantized, perplexity=(50 / bits, 100 / bits), budget=bits, bits_per_weight=bits)
        for bits in (2.4, 3.0)
    ]


def by_seconds(found, model="llama", dense=DENSE):
    return figures.plot_by_seconds(model, dense, found, make_styles(one.label for one in found))


def by_bits(found, model="llama"):
    return figures.draw_figures(model, DENSE, found)["perplexity-by-bits"]


def by_block(shares):
    found = [result(topup=name, block_sparsity=list(values)) for name, values in shares.items()]
    return figures.draw_figures("llama", DENSE, found)["block-sparsity-wanda-70"]


DRAWN = {
    "seconds": lambda: by_seconds(results((0.6, 0.7))),
    "bits": lambda: by_bits(results_with_bits()),
    "blocks": lambda: by_block({"uniform": [0.7] * 40, "neuronal": np.linspace(0.6, 0.8, 40)}),
}


def texts(files):
    """Return everything that is written in a figure's SVG."""
    found = ElementTree.fromstring(files[".svg"]).iter("{http://www.w3.org/2000/svg}text")
    return ["".join(text.itertext()) for text in found]
