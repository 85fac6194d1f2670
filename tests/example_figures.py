"""An example of every figure, and what is written in one."""

import itertools
import math
import xml.etree.ElementTree as ElementTree

import numpy as np

from optimum_neuronal.comparing.figures.speed import plot_speed
from optimum_neuronal.comparing.plots import (
    plot_block_sparsity,
    plot_lambda_curve,
    plot_perplexity_by_bits,
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


def runs_with_bits(topups=("uniform", "search")):
    return [
        run(
            "alps",
            topup,
            sparsity,
            (30 + 9 * index, 60 - (bits or 9)),
            value_bits=bits,
            bits_per_weight=1 + (bits or 16) * (1 - sparsity),
        )
        for bits in (None, 4, 3)
        for sparsity in (0.5, 0.6)
        for index, topup in enumerate(topups)
    ]


LAYER = {
    f"model.layers.{block}.{name}": [0.5 + 0.01 * block] * rows
    for block in range(4)
    for name, rows in (("self_attn.q_proj", 100), ("mlp.down_proj", 10))
}
DRAWN = {
    "perplexity": lambda path: plot_perplexity_by_seconds(runs(), path),
    "bits": lambda path: plot_perplexity_by_bits(runs_with_bits(), path, dense={"wikitext2": 20.0, "c4": 25.0}),
    "lambda": lambda path: plot_lambda_curve([(0.1, 1.5), (0.05, 2.0), (0.2, None)], 0.1, path, "Alignment error"),
    "blocks": lambda path: plot_block_sparsity({"uniform": [0.7] * 40, "neuronal": np.linspace(0.6, 0.8, 40)}, path),
    "rows": lambda path: plot_row_sparsity(LAYER, path),
}

LONG = "owner/a-model-with-a-name-that-goes-on-for-ever-and-beyond-the-width-of-any-figure-2025-01-22-bf16"
TUNED = [f"neuronal:steps=block,block_lambdas=[{','.join(f'0.{i + j:02}' for i in range(14))}]" for j in range(12)]
WORKS = [f"decode, batch {2**index}" for index in range(10)]
# As much of everything as anyone may ask for.
HARD = {
    "perplexity": lambda path: plot_perplexity_by_seconds(
        [
            *(run("alps:iterations=60", topup, perplexity=(30 + i, 40)) for i, topup in enumerate(TUNED)),
            *(
                run(name, "owl", 0.8, (math.inf, 40))
                for name in ("magnitude", "wanda", "sparsegpt", "ria", "multiflow")
            ),
        ],
        path,
        title=LONG,
        dense={"wikitext2": 20.0, "c4": 25.0},
    ),
    "bits": lambda path: plot_perplexity_by_bits(runs_with_bits(TUNED), path, title=LONG),
    "one run": lambda path: plot_perplexity_by_seconds([run()], path, title="model", dense={"wikitext2": 9, "c4": 9}),
    "blocks": lambda path: plot_block_sparsity(
        {name: np.linspace(0.6, 0.7 + 0.01 * i, 80) for i, name in enumerate(TUNED)}, path, title=LONG
    ),
    "blocks alike": lambda path: plot_block_sparsity({"uniform": [0.7] * 3}, path, title="model"),
    "lambda": lambda path: plot_lambda_curve([(0.1, 25.6), (0.11, 25.7)], 0.1, path, "Perplexity", title=LONG),
    "rows": lambda path: plot_row_sparsity(
        {f"model.layers.{block}.mlp.{name}": [0.7, 0.701] for block in range(32) for name in ("up", "down")},
        path,
        title=LONG + TUNED[0],
    ),
    "many rows": lambda path: plot_row_sparsity(
        {f"model.layers.{block}.q": [0.01 * block] for block in range(80)}, path, title="model", scale=(0.0, 0.9)
    ),
    "speed": lambda path: plot_speed(
        {
            **{"model": LONG, "dtype": "bfloat16", "threads": 16, "dense_bytes": 100, "packed_bytes": 40},
            "timings": [{"work": work, "dense": 31.0, "packed": 35.0, "ratio": 1.13} for work in WORKS],
        },
        path,
    ),
}


def texts(paths):
    """What is written in a figure's SVG."""
    return ["".join(text.itertext()) for text in ElementTree.parse(paths[1]).iter("{http://www.w3.org/2000/svg}text")]
