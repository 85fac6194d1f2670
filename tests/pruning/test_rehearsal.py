from collections import Counter

import pytest
import torch
from conftest import make_model
from profiles import at_night

from optimum_neuronal import NeuronALPruner
from optimum_neuronal.pruning.dry_run import plan_prune
from optimum_neuronal.pruning.rehearsal import Rehearsal
from optimum_neuronal.trials.sweep import Sweep

from .conftest import config_of, saved


ALPS = {"saliency": "alps", "saliency_args": {"iterations": 2}}
QUESTIONS = (
    "alignment_errors", "output_errors", "reconstruction_errors", "deviation", "row_saliency", "dense_scores",
    "weight_scores", "own_runs", "solve",
)  # fmt: skip
BITS = {"sparsity": None, "saliency": None, "bits_per_weight": 5.0}
EXACT = [
    {},
    {"steps": "block", "reference": "dense"},
    {"steps": "row"},
    {"metric": "reconstruction"},
    {"metric": "reconstruction", "reference": "dense"},
    {"block_lambdas": (0.1,), "row_lambdas": (0.0,)},
    {"topup": "uniform"},
    {"topup": "uniform", **ALPS},
    {"topup": "uniform", **ALPS, "reconstruct": "block"},
    {"topup": "uniform", "saliency": "sparsegpt", "refit_epochs": 2, "num_samples": 16},
    {**BITS, "topup": "uniform"},
    {**BITS, "topup": None},
    {"topup": "owl"},
    {"topup": "dlp"},
    {"topup": "alpha_pruning"},
    {"topup": "dsnot"},
    {"topup": "atp", "topup_args": {"trials": 9}},
    {"topup": "besa", "topup_args": {"epochs": 2}},
]
ABOUT = [  # the answers decide how much is asked
    {"topup": "search"},
    {"topup": "search", "topup_args": {"objective": "alignment"}},
    {"topup": "search", **ALPS, "topup_args": {"budget": 30}},
    {"topup": "evopress", "topup_args": {"generations": 3, "offspring": 4, "sequences": (1,)}},
    {"topup": "dsa", "topup_args": {"population": 3, "generations": 2, "offspring": 2}},
]


@pytest.fixture
def asked(monkeypatch):
    """Counters of the questions and of their plans, by class."""
    counted = {Sweep: Counter(), Rehearsal: Counter()}
    for kind in counted:
        for name in QUESTIONS:
            monkeypatch.setattr(kind, name, noting(kind, name, kind.__dict__[name], counted[kind]))
    return counted


def noting(kind, name, original, counted):
    def ask(self, *args, **kwargs):
        if type(self) is kind:
            counted[name] += 1
            counted[f"plans of {name}"] += len(args[0]) if name.endswith("errors") else 0
        if name == "alignment_errors":
            kwargs.pop("bound", None)  # no candidate is abandoned
        return original(self, *args, **kwargs)

    return ask


def planned_and_pruned(fields, tmp_path, ids, layers=4):
    model, config = make_model("llama", num_hidden_layers=layers), config_of(**fields)
    plan, pruner = plan_prune(saved(tmp_path, model)[0], config), NeuronALPruner(config)
    pruner.prune(model, dataset=torch.randint(0, 64, (config.num_samples, 16)))
    return plan, pruner.report


@pytest.mark.parametrize("fields", EXACT, ids=str)
def test_a_topup_asks_the_same_and_blocks_run_as_often(fields, tmp_path, ids, asked):
    plan, report = planned_and_pruned(fields, tmp_path, ids)
    assert asked[Rehearsal] == asked[Sweep]
    looks = 4 if plan.config["saliency"] != "wanda" else 0  # the first batch tells the stages of a block
    assert 0 <= report.block_forwards - plan.block_forwards <= looks * 16 * 2


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_models_of_few_blocks(layers, tmp_path, ids):
    plan, report = planned_and_pruned({"reference": "dense"}, tmp_path, ids, layers)
    assert plan.block_forwards == report.block_forwards


@pytest.mark.parametrize("fields", ABOUT, ids=str)
def test_a_search_asks_about_as_much(fields, tmp_path, ids, asked):
    plan, report = planned_and_pruned(fields, tmp_path, ids)
    planned, real = (sum(n for name, n in asked[kind].items() if "errors" in name) for kind in (Rehearsal, Sweep))
    assert real / 1.5 <= planned <= 1.5 * real and asked[Rehearsal]["solve"] == asked[Sweep]["solve"]
    assert report.block_forwards / 1.5 <= plan.block_forwards <= 1.5 * report.block_forwards


def test_a_prune_without_abandoned_candidates_takes_no_more(tmp_path, ids):
    plan, report = planned_and_pruned({"block_lambdas": (0.01, 0.05, 0.1, 0.2, 0.25)}, tmp_path, ids)
    assert plan.block_forwards / 3 < report.block_forwards <= plan.block_forwards


def test_steps_are_those_of_the_prune_in_order(tmp_path, ids):
    fields = {**ALPS, "topup": "search", "topup_args": {"budget": 20}, "num_samples": 12}
    plan, _ = planned_and_pruned(fields, tmp_path, ids)
    assert [step.label for step in plan.steps] == ["Check", "Levels", "Dense activations", "Search", "Pruning"]
    assert plan.steps[1].block_forwards == 4 * (12 - 2), "but for the sequences that candidates are measured on"
    for step in plan.steps:
        assert step.seconds > 0 and step.moment_bytes > 0 and step.hidden_bytes > 0


def test_hidden_states_and_masks(tmp_path, ids):
    """Every candidate's hidden states in front of and behind a block; of a mask one bit for each weight."""
    plan, _ = planned_and_pruned({"steps": "block"}, tmp_path, ids)
    step = next(step for step in plan.steps if step.label == "Block step")
    assert step.hidden_bytes == 2 * 2 * 2 * 16 * 32 * 4, "two plans at most together, two sequences"
    assert plan.steps[-1].hidden_bytes == 2 * 6 * 16 * 32 * 4
    assert plan.steps[-1].kept_bytes == pytest.approx(plan.pruned_weights / 8, rel=0.5)


def test_random_numbers_and_blocks_that_are_left_out(tmp_path, llama):
    """The user's generator goes on as if nothing had been drawn, and a sample consists of pruned blocks."""
    before = torch.random.get_rng_state()
    plan = plan_prune(saved(tmp_path, llama)[0], config_of(topup="owl", ignore=[r"layers\.0\."]))
    assert torch.equal(before, torch.random.get_rng_state()) and plan.projections == 14


@at_night
@pytest.mark.parametrize("topup", ["uniform", "atp"])
def test_memory_and_time_are_near_to_those_of_a_prune(topup):
    from benchmarks.dry_run import SIZES, run

    args = {name: default for name, (default, _) in SIZES.items()} | {"hidden_size": 256, "tokens": 64}
    args |= {"sequences": 16, "alignment": 4, "threads": 1}
    found = run(topup, "wanda", 4000, type("Args", (), args))
    assert 0.5 < found["seconds"] / found["foretold_seconds"] < 2
    assert 0.7 < found["bytes"] / found["foretold_bytes"] < 1.4
