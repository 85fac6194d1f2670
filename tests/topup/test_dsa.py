import math

import pytest
import torch
from by_hand import FakeOutputs, by_block
from conftest import make_model
from trial_helpers import make_evaluator

from optimum_neuronal.blocks.runner import replay
from optimum_neuronal.common.torch_state import inference
from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.topup.dsa import DSA, PRE, REDUCE, ElementSums, Function, block_statistics


class FakeTrials(FakeOutputs):
    """Every statistic of the blocks is the same: 1, 2 and 3."""

    def measure_once(self, measurement):
        return [[float(index + 1)] * (len(PRE) * len(REDUCE)) for index in range(len(self.decoder.blocks))]


def test_the_best_known_function_wins_and_no_plan_is_tried_twice(llama):
    """The error falls with the last block's sparsity. Many functions are the same, such as mean and mean of absolutes."""
    tried = []
    evaluator = FakeTrials(find_decoder(llama), lambda shares: tried.append(tuple(shares)) or shares[1] - shares[2])
    allocation = DSA().allocate(evaluator, 0.6)
    decision = allocation.decisions["dsa"]
    best = min(decision["candidates"], key=lambda candidate: candidate["error"])
    assert decision["function"] == best["function"]
    shares = by_block(evaluator.decoder.blocks, allocation.plan)
    assert shares[1] - shares[2] == best["error"] and sum(shares) / 3 == pytest.approx(0.6)
    assert len(tried) == len(set(tried)) == 58
    assert evaluator.asked == [(10, "nll", None), *[(8, "nll", None)] * 6]


VALUES = torch.tensor([[1.0, 2.0], [4.0, 9.0]])


def test_reductions_by_hand():
    for name, expected in {
        "mean": 4.0,
        "var": ((1 - 4) ** 2 + (2 - 4) ** 2 + 0 + (9 - 4) ** 2) / 3,
        "std": math.sqrt(38 / 3),
        "l1_norm": 4.0,
        "frobenius_norm": math.sqrt(1 + 4 + 16 + 81),
        "geometric_mean": 72 ** (1 / 4),
        "entropy": -sum(x / 16 * math.log(x / 16) for x in (1, 2, 4, 9)),
    }.items():
        for parts in ([VALUES], VALUES):
            assert REDUCE[name](ElementSums.joined(map(ElementSums.of, parts))) == pytest.approx(expected)


def test_elements_by_hand():
    for name, function in {
        "no_op": lambda x: x,
        "abs": abs,
        "log": math.log,
        "abslog": math.log,
        "pow": lambda x: x**2,
        "exp": math.exp,
        "normalize": lambda x: (x - 4) / math.sqrt(38 / 3),
        "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
        "tanh": math.tanh,
        "mms": lambda x: (x - 1) / 8,
    }.items():
        found = PRE[name](VALUES, ElementSums.of(VALUES)).flatten().tolist()
        assert found == pytest.approx([function(x) for x in (1, 2, 4, 9)], rel=1e-4, abs=1e-5)


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
    evaluator = FakeTrials(find_decoder(llama))
    plan = DSA().plan(evaluator, 0.6, Function("no_op", "mean", ("no_op",), 0.1), statistics)
    assert by_block(evaluator.decoder.blocks, plan) == pytest.approx([0.5, 0.6, 0.7])


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_statistics_are_those_of_wandas_metric(family, ids):
    model = make_model(family)
    with inference(model):
        evaluator = make_evaluator(model, ids, "magnitude")
        statistics, inputs = block_statistics(evaluator), evaluator.runner.capture(ids)
        for index, block in enumerate(evaluator.decoder.blocks):
            inputs.hidden, norms = replay(block, inputs.hidden, inputs.calls[index])
            activations = evaluator.inputs(block, norms).activations
            metric = torch.cat([(p.weight.abs() * activations[p.name]).flatten() for p in block.pruned]).double()
            scaled, shares = (metric - metric.min()) / (metric.max() - metric.min()), metric / metric.sum()
            for pre, reduce, expected in [
                ("no_op", "mean", metric.mean()),
                ("no_op", "std", metric.std()),
                ("abslog", "var", metric.log().var()),
                ("mms", "mean", scaled.mean()),
                ("no_op", "entropy", -(shares * shares.log()).sum()),
            ]:
                rel = 1e-5 if reduce == "mean" and pre == "no_op" else 1e-4
                assert statistics[pre, reduce][index].item() == pytest.approx(expected.item(), rel=rel)
            assert statistics["normalize", "mean"][index].item() == pytest.approx(0, abs=1e-5)
