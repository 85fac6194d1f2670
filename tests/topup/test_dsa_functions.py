import math

import pytest
import torch
from conftest import make_model
from sweeps import build_sweep

from optimum_neuronal.engine.capture import inference
from optimum_neuronal.engine.replay import replay
from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.saliency import SALIENCIES
from optimum_neuronal.topup.dsa_functions import PRE, REDUCE, TRANSFORM, ElementSums, Function, block_statistics


VALUES = torch.tensor([[1.0, 2.0], [4.0, 9.0]])


@pytest.mark.parametrize(
    "name, expected",
    [
        ("mean", 4.0),
        ("var", ((1 - 4) ** 2 + (2 - 4) ** 2 + 0 + (9 - 4) ** 2) / 3),
        ("std", math.sqrt(38 / 3)),
        ("l1_norm", 4.0),
        ("frobenius_norm", math.sqrt(1 + 4 + 16 + 81)),
        ("geometric_mean", 72 ** (1 / 4)),
        ("entropy", -sum(x / 16 * math.log(x / 16) for x in (1, 2, 4, 9))),
    ],
)
def test_reductions_by_hand(name, expected):
    assert REDUCE[name](ElementSums.of(VALUES)) == pytest.approx(expected)
    parts = ElementSums.of(VALUES[:1]) + ElementSums.of(VALUES[1:])
    assert REDUCE[name](parts) == pytest.approx(expected), "projection by projection"


def test_reductions_of_negative_elements():
    moments = ElementSums.of(torch.tensor([-1.0, 4.0, 0.0]))
    assert REDUCE["l1_norm"](moments) == pytest.approx(5 / 3)
    assert REDUCE["geometric_mean"](moments) == 0
    assert REDUCE["entropy"](moments) == pytest.approx(0, abs=1e-6), "one element above zero is certain"
    assert math.isnan(REDUCE["entropy"](ElementSums.of(torch.tensor([-1.0, -2.0]))))


@pytest.mark.parametrize(
    "name, expected",
    [
        ("no_op", [1, 2, 4, 9]),
        ("abs", [1, 2, 4, 9]),
        ("log", [0, math.log(2), math.log(4), math.log(9)]),
        ("abslog", [0, math.log(2), math.log(4), math.log(9)]),
        ("pow", [1, 4, 16, 81]),
        ("exp", [math.exp(x) for x in (1, 2, 4, 9)]),
        ("normalize", [(x - 4) / math.sqrt(38 / 3) for x in (1, 2, 4, 9)]),
        ("sigmoid", [1 / (1 + math.exp(-x)) for x in (1, 2, 4, 9)]),
        ("tanh", [math.tanh(x) for x in (1, 2, 4, 9)]),
        ("mms", [0, 1 / 8, 3 / 8, 1]),
    ],
)
def test_elements_by_hand(name, expected):
    assert PRE[name](VALUES, ElementSums.of(VALUES)).flatten().tolist() == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_logarithms_of_zero_and_below():
    """As the authors do: what has no logarithm counts as one."""
    elements = torch.tensor([0.0, -2.0])
    assert PRE["log"](elements, ElementSums()).tolist() == pytest.approx([0, 0], abs=1e-5)
    assert PRE["abslog"](elements, ElementSums()).tolist() == pytest.approx([0, math.log(2)])


def test_every_transform_is_one_of_values():
    values = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    for name, transform in TRANSFORM.items():
        assert transform(values).shape == values.shape and bool(transform(values).isfinite().all()), name


def test_the_authors_own_function():
    """Of their read-me: the variance of the logarithm, of which the arc tangent, of which the arc sine."""
    function = Function("abslog", "var", ("atan", "asin"), 0.07)
    assert str(function) == "W:(ABSLOG)-(VAR)-(ATAN,ASIN)-(7)"
    values = torch.tensor([0.1, 0.5, 2.0], dtype=torch.float64)  # atan 2 is above 1 and has no arc sine
    expected = [math.asin(math.atan(0.1)), math.asin(math.atan(0.5)), 0.0]
    assert function.importances({("abslog", "var"): values}).tolist() == pytest.approx(expected)


def test_sparsities_by_hand(llama):
    """Importances 1, 2, 3 turned around are densities 0.2, 0.1, 0 above their mean: the third block is pruned most."""
    statistics = {("no_op", "mean"): torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)}
    decoder = find_decoder(llama)
    rising = Function("no_op", "mean", ("no_op",), 0.1).sparsities(decoder, 0.6, statistics)
    assert rising == pytest.approx([0.5, 0.6, 0.7])
    low, middle, high = (math.cos(value) for value in (3, 2, 1))
    falling = Function("no_op", "mean", ("cos",), 0.1).sparsities(decoder, 0.6, statistics)
    assert falling[0] - falling[2] == pytest.approx(0.2)
    assert (falling[1] - falling[2]) / 0.2 == pytest.approx((middle - low) / (high - low))


def test_infinite_importances_are_no_function(llama):
    statistics = {("exp", "mean"): torch.tensor([1.0, math.inf, 2.0], dtype=torch.float64)}
    function = Function("exp", "mean", ("no_op",), 0.1)
    assert function.importances(statistics) is None
    assert function.sparsities(find_decoder(llama), 0.6, statistics) is None


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_statistics_are_those_of_wandas_metric(family, ids):
    model = make_model(family)
    with inference(model):
        sweep = build_sweep(find_decoder(model), SALIENCIES.get("magnitude")(), ids, 4)
        statistics = block_statistics(sweep)
        inputs = sweep.engine.runner.capture(ids)
        for index, block in enumerate(sweep.decoder.blocks):
            inputs.hidden, norms = replay(block, inputs.hidden, inputs.calls[index])
            activations, _ = sweep.engine.applier.activations(block, norms)
            metric = torch.cat([(p.weight.abs() * activations[p.name]).flatten() for p in block.pruned]).double()
            assert statistics["no_op", "mean"][index].item() == pytest.approx(metric.mean().item(), rel=1e-5)
            assert statistics["no_op", "std"][index].item() == pytest.approx(metric.std().item(), rel=1e-4)
            assert statistics["abslog", "var"][index].item() == pytest.approx(metric.log().var().item(), rel=1e-4)
            scaled = (metric - metric.min()) / (metric.max() - metric.min())
            assert statistics["mms", "mean"][index].item() == pytest.approx(scaled.mean().item(), rel=1e-4)
            assert statistics["normalize", "mean"][index].item() == pytest.approx(0, abs=1e-5)
            shares = metric / metric.sum()
            entropy = -(shares * shares.log()).sum().item()
            assert statistics["no_op", "entropy"][index].item() == pytest.approx(entropy, rel=1e-4)
