import math

import pytest
import torch
from conftest import make_model
from sweeps import build_sweep

from optimum_neuronal.engine.capture import inference
from optimum_neuronal.engine.replay import replay
from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.saliency import SALIENCIES
from optimum_neuronal.topup.dsa import DSA, PRE, REDUCE, TRANSFORM, ElementSums, Function, block_statistics


class FakeSweep:
    """Every statistic of the blocks is the same, 1, 2 and 3; errors are of its own making."""

    def __init__(self, decoder, error):
        self.decoder, self.error, self.asked = decoder, error, []

    def dense_scores(self, score, label):
        return [[float(index + 1)] * (len(PRE) * len(REDUCE)) for index in range(len(self.decoder.blocks))]

    def output_errors(self, plans, metric, label, reference="dense"):
        self.asked.append((metric, len(plans)))
        return [self.error([plan.sparsity[block.pruned_names[0]] for block in self.decoder.blocks]) for plan in plans]


def test_the_best_known_function_wins(llama):
    """The error falls with the last block's sparsity; no function gives it more than the window: 0.6 + 0.1."""
    sweep = FakeSweep(find_decoder(llama), lambda found: -found[2] + found[1])
    allocation = DSA().allocate(sweep, 0.6)
    decision = allocation.decisions["dsa"]
    best = min(decision["candidates"], key=lambda candidate: candidate["error"])
    assert decision["function"] == best["function"]
    by_block = [allocation.plan.sparsity[block.pruned_names[0]] for block in sweep.decoder.blocks]
    assert by_block[1] - by_block[2] == best["error"] and sum(by_block) / 3 == pytest.approx(0.6)
    assert sweep.asked == [("nll", 10), *[("nll", 8)] * 6]


def test_offspring_are_of_the_better_half(llama):
    """Without mutation every part of an offspring is one of its parents'."""
    generator = torch.Generator().manual_seed(0)
    topup = DSA(mutation=0.0)
    parents = [Function("log", "var", ("sin",), 0.07), Function("exp", "std", ("cos", "tan"), 0.1)]
    for child in (topup._child(generator, parents) for _ in range(20)):
        for part in ("pre", "reduce", "transforms", "lam"):
            assert getattr(child, part) in {getattr(parent, part) for parent in parents}
    fresh = {DSA(mutation=1.0)._child(generator, parents[:1]).pre for _ in range(50)}
    assert len(fresh) > 5


def test_no_plan_is_tried_twice(llama):
    """Many functions are the same, such as the mean and the mean of absolute values."""
    tried = []
    sweep = FakeSweep(find_decoder(llama), lambda found: tried.append(tuple(found)) or 1.0)
    DSA().allocate(sweep, 0.6)
    assert len(tried) == len(set(tried)) == 58


@pytest.mark.parametrize("sparsity", [0.0, 0.995])
def test_where_no_window_fits_one_plan_is_tried(llama, sparsity):
    sweep = FakeSweep(find_decoder(llama), lambda found: 1.0)
    assert set(DSA().allocate(sweep, sparsity).plan.sparsity.values()) == {sparsity}
    assert sweep.asked[0] == ("nll", 1) and sum(count for _, count in sweep.asked) == 1


def test_blocks_left_out_take_no_part(ids):
    model = make_model("llama")
    with inference(model):
        decoder = find_decoder(model, ignore=[r"layers\.1\."])
        sweep = build_sweep(decoder, SALIENCIES.get("wanda")(), ids, 4)
        plan = DSA(population=3, generations=1, offspring=2).allocate(sweep, 0.6).plan
    assert set(plan.sparsity) == set(decoder.projections)
    assert sum(set(plan.sparsity.values())) / 2 == pytest.approx(0.6)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"population": 0}, "population is 0: expected a whole number of at least 1"),
        ({"generations": -1}, "generations is -1"),
        ({"mutation": 1.5}, "mutation is 1.5: expected a number from 0 to 1"),
        ({"lambdas": ()}, "lambdas is empty: expected at least one number"),
        ({"lambdas": (2.0,)}, "lambdas is 2.0: expected a number from 0 to 1"),
    ],
)
def test_bad_hyper_parameters(arguments, message):
    with pytest.raises(ValueError, match=message):
        DSA(**arguments)


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
