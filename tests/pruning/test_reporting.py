"""The report, and the sparsity that it counts."""

from itertools import product
from types import SimpleNamespace

import pytest
import torch
from by_hand import make_block
from conftest import make_model

from optimum_neuronal import NeuronALConfig
from optimum_neuronal.data.calibration import CalibrationSet
from optimum_neuronal.model.change import NewWeight, Zeros
from optimum_neuronal.model.projections import Block
from optimum_neuronal.pruning.context import PruneContext
from optimum_neuronal.pruning.reporting import (
    PruneOutcome,
    hub_id,
    make_report,
    measure_sparsity,
    public_name,
    without_folders,
)
from optimum_neuronal.saliency.plan import Plan
from optimum_neuronal.topup import Allocation


def report_of(decisions, calibration=None, dataset="c4"):
    block = make_block([[0.0, 1.0, 2.0, 3.0]])
    model = SimpleNamespace(dtype=torch.bfloat16)
    decoder = SimpleNamespace(model=model, blocks=[block], projections=block.projections)
    config = NeuronALConfig(0.5, topup="neuronal", dataset=dataset, saliency="wanda")
    outcome = PruneOutcome(Allocation(Plan({"block.0": 0.5}), decisions), {}, 12, ["experts.0.up"])
    context = PruneContext(decoder, config, calibration=calibration)
    context.clock.seconds["pruning"] = 2.0
    return make_report(context, outcome, {})


def test_what_was_asked_for_and_what_was_found():
    report = report_of({"block": {"lambda": 0.125}, "row": {"lambda": 0.0}})
    assert (report.requested_sparsity, report.achieved_sparsity, report.blocks) == (0.5, 0.25, {"block": 0.25})
    assert report.bits_per_weight == 8 * 4, (
        "a word of mask beside three values of four bytes would be larger than dense"
    )
    assert (report.block_lambda, report.row_lambda) == (0.125, 0.0)
    assert report.decisions == {"block": {"lambda": 0.125}, "row": {"lambda": 0.0}}
    assert (report.block_forwards, report.starved_experts) == (12, ["experts.0.up"])
    assert report.seconds == {"pruning": 2.0} and report.config["topup"] == "neuronal" and report.calibration == {}
    assert report.dtype == "bfloat16"


def test_what_is_published_names_no_folder(tmp_path):
    (tmp_path / "own.txt").write_text("text")
    report = report_of(
        {}, CalibrationSet(torch.zeros(3, 16, dtype=torch.int64), "own.txt", "documents"), f"{tmp_path}/own.txt"
    )
    assert report.config["dataset"] == "own.txt" and report.calibration["num_samples"] == 3
    assert str(tmp_path) not in str(report.to_dict())


def test_a_file_keeps_only_its_name(tmp_path):
    (tmp_path / "own.jsonl").write_text("{}")
    for folder, column in product([tmp_path, "/no/such/folder"], ["", ":text"]):
        assert without_folders(f"{folder}/own.jsonl{column}") == f"own.jsonl{column}"
    for dataset in ["wikitext2", "allenai/c4:train:text", "no/such/file.txt", "a text " * 1000]:
        assert without_folders(dataset) == dataset


def test_zeros_are_counted_by_projection_by_block_and_on_the_whole():
    """3 of 4, 0 of 2 and 1 of 4 weights; a block without pruned projections is left out."""
    first = make_block([[0.0, 0.0], [0.0, 1.0]], [[1.0], [2.0]], name="first")
    last = make_block([[0.0, -1.0, 5.0, 2.0]], name="last")
    decoder = SimpleNamespace(blocks=[first, Block("left out", make_block([[0.0]]).module, {}), last])
    whole, blocks, projections = measure_sparsity(decoder)
    assert whole == pytest.approx(4 / 10)
    assert blocks == {"first": 3 / 6, "last": 1 / 4}
    assert projections == {
        "first.0": {"sparsity": 0.75, "smallest_row": 0.5, "largest_row": 1.0},
        "first.1": {"sparsity": 0.0, "smallest_row": 0.0, "largest_row": 0.0},
        "last.0": {"sparsity": 0.25, "smallest_row": 0.25, "largest_row": 0.25},
    }


def test_what_weights_will_be_is_counted_before_they_are():
    block = make_block([[0.0, 2.0], [3.0, 4.0]], [[1.0], [2.0]])
    changes = {
        "block.0": Zeros(torch.tensor([[True, False], [False, True]])),
        "block.1": NewWeight(torch.tensor([[0.0], [7.0]])),
    }
    whole, blocks, projections = measure_sparsity(SimpleNamespace(blocks=[block]), changes)
    assert whole == blocks["block"] == pytest.approx(4 / 6)
    assert projections["block.0"] == {"sparsity": 0.75, "smallest_row": 0.5, "largest_row": 1.0}
    assert [p.weight.tolist() for p in block.pruned] == [[[0.0, 2.0], [3.0, 4.0]], [[1.0], [2.0]]]


@pytest.fixture(scope="module")
def model():
    return make_model("llama")


@pytest.mark.parametrize(
    "origin, on_the_hub, name",
    [
        ("meta/llama", "meta/llama", "meta/llama"),
        ("gpt2", "gpt2", "gpt2"),
        ("", None, "LlamaForCausalLM"),
        ("a/b/c", None, "c"),
        ("/gone/dense", None, "dense"),
        ("./dense", None, "dense"),
        ("../my dense/", None, "my dense"),
    ],
)
def test_names_hold_no_folder(model, origin, on_the_hub, name):
    model.config._name_or_path = origin
    assert (hub_id(model), public_name(model)) == (on_the_hub, name)


def test_what_lies_here_is_not_on_the_hub(model, tmp_path, monkeypatch):
    (tmp_path / "own" / "dense").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "own")
    for origin, name in (("dense", "dense"), (".", "own"), (str(tmp_path / "own" / "dense"), "dense")):
        model.config._name_or_path = origin
        assert (hub_id(model), public_name(model)) == (None, name)


@pytest.mark.parametrize("folder, repository", [("models--meta--llama-3", "meta/llama-3"), ("models--gpt2", "gpt2")])
def test_a_snapshot_of_the_cache_is_on_the_hub(model, folder, repository, tmp_path):
    snapshot = tmp_path / folder / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    model.config._name_or_path = str(snapshot)
    assert hub_id(model) == public_name(model) == repository
