"""What fits into a budget of bits a weight, and how it is spent."""

import pytest
import torch
import transformers
from conftest import make_model
from interruptions import interrupt_at_second_block
from sweeps import state, unchanged

from optimum_neuronal import NeuronALConfig, NeuronALPruner
from optimum_neuronal.formats.coded import CodedWeight
from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.model.packed_size import packed_size
from optimum_neuronal.pruning import bit_budget as choosing_bits
from optimum_neuronal.pruning import context
from optimum_neuronal.pruning.bit_budget import Pair, likely, pairs_within
from optimum_neuronal.pruning.final_pass import FinalPruning
from optimum_neuronal.topup.search import Search


@pytest.fixture(scope="module")
def decoder():
    """Projections of whole groups: scales take 0.125 bits a weight."""
    return find_decoder(make_model("llama", hidden_size=128, intermediate_size=256))


def taken(decoder, sparsity, value_bits):
    return packed_size(decoder, lambda p: int(sparsity * p.numel), value_bits).bits_per_weight


def test_a_weight_takes_its_mask_scales_and_codes(decoder):
    assert taken(decoder, 0.0, 8) == pytest.approx(1 + 0.0625 + 8)
    for sparsity, bits in ((0.6, 4), (0.4, 3), (0.5, 2)):
        assert 0 < taken(decoder, sparsity, bits) - (1.0625 + (1 - sparsity) * bits) < 0.1, "codes fill whole bytes"


@pytest.mark.parametrize("bits", [2.0, 2.4, 3.0, 5.5])
def test_every_pair_fits_and_nothing_less_sparse_does(decoder, bits):
    """Of the pairs without a zero the one with most bits stays."""
    pairs = pairs_within(decoder, NeuronALConfig(bits_per_weight=bits))
    assert [pair.sparsity for pair in pairs] == sorted({pair.sparsity for pair in pairs})
    assert [pair.value_bits for pair in pairs] == sorted(pair.value_bits for pair in pairs)
    for value_bits, sparsity in pairs:
        assert taken(decoder, sparsity, value_bits) <= bits
        assert sparsity == 0 or taken(decoder, sparsity - 1e-4, value_bits) > bits
    assert bits != 5.5 or pairs[0] == Pair(4, 0.0)


def test_what_is_given_decides_the_rest(decoder):
    config = NeuronALConfig(bits_per_weight=2.4, value_bits=3)
    (pair,) = pairs_within(decoder, config)
    assert pair in pairs_within(decoder, NeuronALConfig(bits_per_weight=2.4)) and pair.value_bits == 3
    assert pair.of(config) == NeuronALConfig(pair.sparsity, value_bits=3)
    for sparsity, expected in ((0.5, 2), (0.6, 3), (0.7, 4), (0.9, 8)):
        assert pairs_within(decoder, NeuronALConfig(sparsity, bits_per_weight=2.4))[0] == Pair(expected, sparsity)


def test_a_choice_stays_open_and_costs_are_told_of_what_is_likely(decoder):
    config, plain = NeuronALConfig(bits_per_weight=2.4), NeuronALConfig(0.7)
    assert likely(plain, []) is plain
    assert pairs_within(decoder, plain) == []
    found = likely(config, pairs_within(decoder, config))
    assert found.value_bits == 3 and found.bits_per_weight is None


def test_what_does_not_fit_is_told(decoder):
    lowest = (
        "bits_per_weight is 1.2, but 95.00% sparsity with values of 2 bits takes 1.2.. bits a weight in this model"
    )
    given = "50.00% sparsity with values of 2 bits takes 2.1.. .*, or more sparsity"
    for fields, message in [
        ({"bits_per_weight": 1.2}, lowest),
        ({"bits_per_weight": 2.0, "sparsity": 0.5}, given),
        ({"bits_per_weight": 1.4, "value_bits": 8}, "95.00% sparsity with values of 8 bits takes 1.463"),
    ]:
        with pytest.raises(ValueError, match=message):
            pairs_within(decoder, NeuronALConfig(**fields))


FAST = {"saliency": "sparsegpt", "topup": "uniform", "num_samples": 8, "num_alignment_samples": 4, "dataset": None}
FAST["targets"] = ["q_proj", "down_proj"]
BITS = 3.0  # of so few columns scales take half a bit a weight


def prune(ids, work_dir=None, layers=2, **fields):
    model = make_model("llama", num_hidden_layers=layers)
    pruner = NeuronALPruner(NeuronALConfig(**{**FAST, "bits_per_weight": BITS, **fields}))
    pruner.prune(model, ids, work_dir=work_dir)
    return model, pruner.report


def owners(model):
    return [projection.owner.detach() for projection in find_decoder(model, FAST["targets"]).projections.values()]


class TestByUniformSparsity:
    @pytest.mark.parametrize("fields", [{}, {"saliency": "wanda", "topup": "owl"}], ids=str)
    def test_what_loses_least_is_pruned_with(self, ids, fields):
        model, report = prune(ids, **fields)
        told = report.decisions["bits"]
        best = min(told["pairs"], key=lambda pair: pair["uniform"])
        assert told["budget"] == BITS and [pair["value_bits"] for pair in told["pairs"]] == [2, 3, 4, 8]
        assert not any("error" in pair for pair in told["pairs"]), "no top-up here tries rounded candidates"
        assert report.config["value_bits"] == best["value_bits"] and report.config["bits_per_weight"] is None
        assert report.config["sparsity"] == report.requested_sparsity == best["sparsity"]
        assert report.achieved_sparsity == pytest.approx(best["sparsity"], abs=1e-3)
        assert all(CodedWeight.exact(owner, best["value_bits"]) is not None for owner in owners(model))

    def test_the_model_takes_no_more_bits(self, ids):
        model, report = prune(ids, topup="uniform")
        found = [CodedWeight.exact(owner, report.config["value_bits"]) for owner in owners(model)]
        bits = 8 * sum(coded.nbytes for coded in found) / sum(owner.numel() for owner in owners(model))
        assert bits == pytest.approx(report.bits_per_weight, abs=0.01) and bits < BITS + 0.01
        assert f"{report.bits_per_weight:.3f} (at most 3; candidates:" in str(report)

    def test_the_error_is_that_of_the_models_outputs(self, ids):
        """Against the divergence of one block that is pruned with each pair, on all sequences as the choice is then."""
        own = {"saliency": "wanda", "num_alignment_samples": 5}
        _, report = prune(ids, layers=1, **own)
        dense = make_model("llama", num_hidden_layers=1).eval()
        for pair in report.decisions["bits"]["pairs"]:
            fixed = {"bits_per_weight": None, "sparsity": pair["sparsity"], "value_bits": pair["value_bits"]}
            model = prune(ids, layers=1, **own, **fixed)[0].eval()
            with torch.no_grad():
                expected, found = (m(ids[:5]).logits[:, :-1].log_softmax(-1).double() for m in (dense, model))
            error = (expected.exp() * (expected - found)).sum(-1).mean().item()
            assert pair["uniform"] == pytest.approx(error, rel=1e-3)

    def test_what_was_chosen_repeats_it(self, ids):
        model, report = prune(ids)
        again = make_model("llama", num_hidden_layers=2)
        NeuronALPruner(NeuronALConfig.from_dict(report.config)).prune(again, ids)
        assert all(map(torch.equal, owners(model), owners(again)))


class TestBySearch:
    """What the search finds for pairs that are near to the best one decides between them."""

    OWN = {"topup": "search", "topup_args": {"budget": 20}}

    @pytest.fixture(autouse=True)
    def two(self, monkeypatch):
        """To solve and round levels of all four takes long."""
        monkeypatch.setattr(context, "pairs_within", lambda *asked: pairs_within(*asked)[1:3])

    def test_of_near_pairs_the_one_whose_plan_loses_least(self, ids, monkeypatch):
        monkeypatch.setattr(choosing_bits, "NEAR", 1000.0)
        asked = []
        allocate = Search.allocate

        def spied(search, sweep, sparsity):
            asked.append((sweep.engine.applier.value_bits, sparsity))
            return allocate(search, sweep, sparsity)

        monkeypatch.setattr(Search, "allocate", spied)
        _, report = prune(ids, **self.OWN)
        pairs = report.decisions["bits"]["pairs"]
        assert asked == [(pair["value_bits"], pair["sparsity"]) for pair in pairs], "each once, and none again"
        best = min(pairs, key=lambda pair: pair["error"])
        assert report.config["value_bits"] == best["value_bits"]
        stages = report.decisions["search"]["stages"]
        assert best["error"] == pytest.approx(stages[-1].get("ended", min(stages[0]["errors"])), rel=1e-6)

    def test_what_is_far_is_not_searched(self, ids, monkeypatch):
        monkeypatch.setattr(choosing_bits, "NEAR", 1.0)
        _, report = prune(ids, **self.OWN)
        assert not any("error" in pair for pair in report.decisions["bits"]["pairs"])
        assert report.decisions["search"], "for the chosen one alone"

    def test_interrupted_it_goes_on(self, ids, monkeypatch, tmp_path):
        monkeypatch.setattr(choosing_bits, "NEAR", 1000.0)
        own = {**self.OWN, "reconstruct": "dense"}
        expected, whole = prune(ids, **own)
        with monkeypatch.context() as patch:
            interrupt_at_second_block(patch, FinalPruning, "prune_block")
            with pytest.raises(ConnectionError):
                prune(ids, tmp_path / "work", **own)
        model, report = prune(ids, tmp_path / "work", **own)
        assert all(map(torch.equal, owners(model), owners(expected)))
        assert report.decisions["bits"] == whole.decisions["bits"]


def test_a_model_without_a_head_for_language_needs_to_be_told(ids):
    model = transformers.AutoModelForSequenceClassification.from_config(make_model("llama").config)
    before = state(model)
    message = "has no causal language-model head, so that bits alone .* give value_bits too"
    with pytest.raises(ValueError, match=message):
        NeuronALPruner(NeuronALConfig(**FAST, bits_per_weight=BITS)).prune(model, ids)
    assert unchanged(model, before)
    NeuronALPruner(NeuronALConfig(**FAST, bits_per_weight=BITS, value_bits=3)).prune(model, ids)
