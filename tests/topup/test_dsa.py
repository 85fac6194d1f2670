import pytest
import torch
from conftest import make_model
from sweeps import build_sweep

from optimum_neuronal import NeuronALConfig, NeuronALPruner
from optimum_neuronal.engine.capture import inference
from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.pruning import dry_run
from optimum_neuronal.pruning.dry_run import plan_prune
from optimum_neuronal.pruning.rates import Rates
from optimum_neuronal.saliency import SALIENCIES
from optimum_neuronal.topup.dsa import DSA
from optimum_neuronal.topup.dsa_functions import PRE, REDUCE, Function


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


def test_it_costs_at_most_what_it_tells(tmp_path, ids, llama, monkeypatch):
    monkeypatch.setattr(dry_run, "measure_rates", lambda *args: Rates(*8 * [1e6]))
    llama.save_pretrained(tmp_path)
    arguments = {"population": 3, "generations": 2, "offspring": 2}
    config = NeuronALConfig(
        0.7, topup="dsa", topup_args=arguments, num_samples=6, num_alignment_samples=2, seq_length=16, saliency="wanda"
    )
    plan, pruner = plan_prune(tmp_path, config), NeuronALPruner(config)
    pruner.prune(llama, dataset=ids[:6])
    counts = [(sweep.label, sweep.plans) for sweep in plan.sweeps]
    assert counts[1:-1] == [("DSA statistics", 0), ("Dense activations", 0), ("DSA", 3), ("DSA", 4)]
    assert pruner.report.block_forwards <= plan.block_forwards
    assert len(pruner.report.decisions["dsa"]["candidates"]) <= 7


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"population": 0}, "population is 0: expected a whole number of at least 1"),
        ({"generations": -1}, "generations is -1"),
        ({"mutation": 1.5}, "mutation is 1.5: expected a number from 0 to 1"),
        ({"lambdas": ()}, r"lambdas is \(\): expected numbers"),
        ({"lambdas": (2.0,)}, "lambdas is 2.0: expected a number from 0 to 1"),
    ],
)
def test_bad_hyper_parameters(arguments, message):
    with pytest.raises(ValueError, match=message):
        DSA(**arguments)
