"""The plans of the variant `authors`, bit for bit, against the formulas of the authors' code, written out as there."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from by_hand import FakeTrials, make_block
from conftest import make_model

from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.saliency.plan import Plan, row_counts
from optimum_neuronal.topup import neuronal_variants
from optimum_neuronal.topup.alpha_pruning import AuthorsAlphaPruning, block_alphas
from optimum_neuronal.topup.neuronal import LAMBDAS
from optimum_neuronal.topup.neuronal_variants import AuthorsNeuronAL, row_plan, rows_of
from optimum_neuronal.trials.alignment import Deviation


SPARSITIES = (0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8)
HIGH_AND_LOW = (*SPARSITIES, 0.05, 0.95)  # where sparsities leave (0, 1)


def their_spread(values, sparsity, lam, ordered=False) -> list[float]:
    """`get_sparsity_owl`, and with `ordered` `get_distribution_block`: sparsities by block."""
    density = np.array(values)
    density = (density - density.min()) * (1 / (density.max() - density.min()) * lam * 2)
    density = density - np.mean(density) + (1 - sparsity)
    if ordered:
        density = sorted(density, reverse=True)
    return [0.01 if 1 - d <= 0 else 0.99 if 1 - d >= 1 else 1 - d for d in density]


def their_rows(alignment, base, lam, is_skipped=False):
    """`get_distribution_row`: sparsities by row from float32 deviations, float64 or a list of what `base` is."""
    single = alignment.tolist()
    if alignment.sum() == 0 or is_skipped:
        return [base] * len(single)
    density = np.array(single, dtype=float)
    density = ((density - density.min()) / (density.max() - density.min())) * lam * 2
    density -= np.mean(density) - (1 - base)
    return np.clip(1 - density, 0.01, 0.99)


def their_pruned(sparsities, shape) -> torch.Tensor:
    """`compute_mask` of `"neuron"`, and its operator, which reads the first entries: pruned weights by row."""
    kept = (torch.tensor([1 - share for share in sparsities]) * shape[1]).to(dtype=torch.long)
    return shape[1] - kept[: shape[0]]


@pytest.mark.parametrize("sparsity", HIGH_AND_LOW)
def test_block_plans(sparsity, monkeypatch):
    monkeypatch.setattr(neuronal_variants, "plan_of_blocks", lambda blocks, sparsities: sparsities.tolist())
    topup = AuthorsNeuronAL()
    for count in range(2, 127):
        decoder = SimpleNamespace(blocks=[SimpleNamespace(pruned=True)] * count)
        for lam in (0.0, *LAMBDAS):
            assert topup.block_plan(decoder, sparsity, lam) == their_spread(range(1, count + 1), sparsity, lam, True)


@pytest.mark.parametrize("blocks", [2, 3, 12, 32, 40])
def test_alpha_prunings_plans(blocks):
    """`ww_sparsity`, with projections of other sizes: exponents by projection, float32 as numbers of Python."""
    generator, shapes = np.random.default_rng(blocks), [(4, 7), (1, 7), (2, 12)]
    evaluator = FakeTrials([make_block(*(torch.ones(shape) for shape in shapes), name=f"b{i}") for i in range(blocks)])
    evaluator.saliency = SimpleNamespace(updates_weights=True)
    for sparsity in HIGH_AND_LOW:
        for _ in range(10):
            exponents = generator.uniform(1.5, 8, (blocks, 3)).astype(np.float32).tolist()
            metrics = [np.mean(block) for block in exponents for _ in range(3)]
            scores = torch.tensor(metrics)
            prunables = torch.tensor([rows * columns for rows, columns in shapes] * blocks)
            s1, s2 = 1.0 - 0.3, 1.0 + 0.3
            ratios = ((scores - torch.min(scores)) / (torch.max(scores) - torch.min(scores))) * (s2 - s1) + s1
            scaler = torch.sum(prunables) * sparsity / (torch.sum(prunables * ratios))
            expected = [min(ratio, 1.0) for ratio in (ratios * scaler).numpy().tolist()]  # a slice ends with the row
            alphas = torch.tensor(block_alphas(exponents), dtype=torch.float64)
            found = AuthorsAlphaPruning().plan(evaluator, sparsity, alphas)
            assert list(found.sparsity.values()) == expected


def bases(generator) -> list:
    """Sparsities of a projection as their block step gives them: float64, and Python's numbers at the bounds."""
    return [*(1 - (1 - np.float64(generator.choice(SPARSITIES) + shift)) for shift in (0, 0.1, -0.1)), 0.01, 0.99]


def assert_same_counts(shape, base, lam, alignment, is_skipped=False):
    values = np.zeros(1) if is_skipped else alignment.astype(np.float64)
    found = row_counts(rows_of(shape, float(base), lam, values), shape)
    assert torch.equal(found, their_pruned(their_rows(alignment, base, lam, is_skipped), shape)), (shape, base, lam)


@pytest.mark.parametrize("kind", ["normal", "skewed", "steps"])
def test_rows(kind):
    """Steps put many rows on the border between two counts, where the last bit decides."""
    generator = np.random.default_rng(0)
    draw = {
        "normal": lambda size: generator.normal(size=size),
        "skewed": lambda size: generator.lognormal(sigma=2, size=size) - 1,
        "steps": lambda size: np.arange(size) % 6,
    }[kind]
    for width in [*generator.integers(100, 5121, 10), *range(100, 1001, 100), 128, 1024, 4096, 5120]:
        alignment = draw(66).astype(np.float32)
        for base in bases(generator):
            for lam in (0.0, *LAMBDAS):
                assert_same_counts((66, int(width)), base, lam, alignment)


def test_alike_rows_at_all_widths():
    """Only here their bounds are float32, to no effect. At 80 percent of 5,120 weights, float64 prunes one more."""
    for width in range(100, 5121):
        for base in (np.float64(0.7), 1 - (1 - np.float64(0.8)), 0.01, 0.99):
            assert_same_counts((1, width), base, 0.1, np.zeros(1, np.float32))
    assert 5120 * rows_of((1, 5120), 0.8, 0.1, np.zeros(1)) == 4097


def draw_deviations(decoder, entries) -> dict[str, np.ndarray]:
    """Deviations of the input of every projection, float32: none of a block's own input, gate's and up's the same."""
    generator, deviations = np.random.default_rng(0), {}
    for name, projection in decoder.projections.items():
        values = generator.normal(size=projection.shape[1]).astype(np.float32)
        deviations[name] = 0 * values if name.endswith(entries) else values
        if name.endswith("up_proj"):
            deviations[name] = deviations[name.replace("up_proj", "gate_proj")]
    return deviations


def their_alignment(blocks, deviations, index, place) -> np.ndarray:
    """`new_alignment` of a projection by its place in the block: of the next ones, or of the next block's first."""
    names = blocks[index].pruned_names
    last = len(names) - 1
    if place == last:
        return deviations[blocks[index + 1].pruned_names[0]]
    return deviations[names[3 if place <= 2 else 4 if place == 3 else last]]


@pytest.mark.parametrize("family", ["llama", "mistral", "opt", "phi"])
def test_rows_of_a_model(family):
    """Rows of k and v take the first deviations where queries are grouped. Mistral's q, k and v are alike."""
    heads = {"llama": 2, "mistral": 2, "phi": 4}
    grouped = {"num_key_value_heads": heads[family]} if family in heads else {}
    decoder = find_decoder(make_model(family, num_hidden_layers=3, **grouped))
    attention = ("q_proj", "k_proj", "v_proj")
    deviations = draw_deviations(decoder, (*attention, "fc1") if family == "phi" else attention)
    places = {name: torch.from_numpy(values).double() for name, values in deviations.items()}
    places |= {block.name: torch.arange(32).double() for block in decoder.blocks}
    base = np.float64(0.6)
    plan = row_plan(decoder, Plan.uniform(decoder.projections, float(base)), 0.2, Deviation(0.0, places))
    for index, block in enumerate(decoder.blocks):
        for place, projection in enumerate(block.pruned):
            theirs = [base] * projection.shape[0]
            if index < 2:
                is_skipped = family == "mistral" and projection.name.endswith(attention)
                theirs = their_rows(their_alignment(decoder.blocks, deviations, index, place), base, 0.2, is_skipped)
            found = row_counts(plan.sparsity[projection.name], projection.shape)
            assert torch.equal(found, their_pruned(theirs, projection.shape)), projection.name
