import copy
import json
import logging
import pickle
from dataclasses import asdict, fields, replace

import numpy as np
import pytest

from optimum_neuronal import NeuronALConfig
from optimum_neuronal.config_fields import ALIASES
from optimum_neuronal.topup.neuronal import LAMBDAS, NeuronAL


def test_what_has_no_effect_is_said(caplog):
    logging.getLogger("transformers").propagate = True
    with caplog.at_level("WARNING"):
        NeuronALConfig(0.7, topup="uniform", steps="row", saliency="wanda")
    said = "steps='row' has no effect: the top-up 'uniform' does not use it, but topup='neuronal' does."
    assert said in caplog.text
    with pytest.raises(ValueError, match="Did you mean 'row'"):
        NeuronALConfig(0.7, steps="rows", saliency="wanda")
    caplog.clear()
    NeuronALConfig(0.7, topup="uniform", saliency="wanda")
    assert not caplog.records


# What an earlier release saved: every alias, whichever the top-up.
SAVED_BEFORE = {
    "quant_method": "neuronal",
    "sparsity": 0.7,
    "saliency": "wanda",
    "saliency_args": {},
    "topup": "neuronal",
    "topup_args": {},
    "steps": "both",
    "reference": "sparse-stream",
    "alignment_scope": "sequence",
    "block_lambdas": list(LAMBDAS),
    "row_lambdas": [0.0, *LAMBDAS],
    "dataset": "c4",
    "num_samples": 128,
    "num_alignment_samples": 8,
    "seq_length": None,
    "batch_size": None,
    "max_hidden_bytes": None,
    "min_expert_tokens": 32,
    "seed": 0,
    "targets": None,
    "ignore": None,
    "pattern": None,
    "format": "dense",
}


class TestAliases:
    def test_they_are_no_fields(self):
        config = NeuronALConfig(0.7, topup="neuronal", steps="block", reference="dense", saliency="wanda")
        assert config.topup_args == {"steps": "block", "reference": "dense"}
        assert not ALIASES.keys() & {entry.name for entry in fields(config)}
        assert not ALIASES.keys() & asdict(config).keys() and not ALIASES.keys() & config.to_dict().keys()
        assert config.make_methods().topup == NeuronAL(steps="block", reference="dense")

    @pytest.mark.parametrize(
        "given",
        [
            {"steps": "block"},
            {"topup_args": {"steps": "block"}},
            {"steps": "block", "topup_args": {"steps": "block"}},
            {"steps": "block", "reference": "sparse-stream", "block_lambdas": LAMBDAS},
            {"steps": "block", "block_lambdas": iter(LAMBDAS)},
            {"steps": "block", "block_lambdas": np.array(LAMBDAS)},
            {"topup_args": {"steps": "block", "block_lambdas": list(LAMBDAS), "metric": "l2"}},
            {"topup_args": {"steps": "block", "block_lambdas": LAMBDAS}},
        ],
    )
    def test_configs_that_say_the_same_are_equal(self, given):
        config, expected = (
            NeuronALConfig(0.7, topup="neuronal", **{"saliency": "wanda", **fields})
            for fields in (given, {"steps": "block"})
        )
        stored = json.loads(json.dumps(config.to_dict()))
        assert config == expected == NeuronALConfig.from_dict(stored) and stored == config.to_dict()

    def test_configs_that_differ_are_not_equal(self):
        config = NeuronALConfig(0.7, topup="neuronal", steps="block", saliency="wanda")
        others = ({"steps": "both"}, {"steps": "block", "seed": 1}, {"steps": "block", "saliency": "ria"})
        assert all(
            config != NeuronALConfig(0.7, topup="neuronal", **{"saliency": "wanda", **fields}) for fields in others
        )
        assert config != config.to_dict()

    def test_what_contradicts_is_refused(self):
        with pytest.raises(
            ValueError, match="steps is given twice and differently: steps='row', but .* holds 'block'"
        ):
            NeuronALConfig(0.7, topup="neuronal", steps="row", topup_args={"steps": "block"}, saliency="wanda")

    def test_a_bad_value_is_refused_whichever_the_topup(self):
        for topup in ("neuronal", "search"):
            with pytest.raises(ValueError, match="block_lambdas is"):
                NeuronALConfig(0.7, topup=topup, block_lambdas=[1.5], saliency="wanda")
        with pytest.raises(ValueError, match="Did you mean 'neuronal'"):
            NeuronALConfig(0.7, topup="neuroal", steps="block", saliency="wanda")

    def test_reading_one_gives_the_value_in_force(self):
        config = NeuronALConfig(0.7, topup="neuronal", steps="block", block_lambdas=[0.1], saliency="wanda")
        assert (config.steps, config.block_lambdas, config.reference) == ("block", (0.1,), "sparse-stream")
        other = NeuronALConfig(0.7, topup="search", saliency="wanda")
        assert not hasattr(other, "steps")
        with pytest.raises(
            AttributeError, match="steps is a hyper-parameter of topup='neuronal', but the .* 'search'"
        ):
            other.steps  # noqa: B018
        with pytest.raises(AttributeError, match=r"replace\(config, topup_args=\{'steps': 'row'\}\)"):
            config.steps = "row"

    def test_copies(self):
        config = NeuronALConfig(0.7, topup="neuronal", steps="block", saliency="wanda")
        for other in (copy.copy(config), copy.deepcopy(config), pickle.loads(pickle.dumps(config)), replace(config)):
            assert other == config and other.topup_args == {"steps": "block"}
        assert replace(config, sparsity=0.5) == NeuronALConfig(0.5, topup="neuronal", steps="block", saliency="wanda")
        assert replace(config, topup_args={}).steps == "both", "the old value is not given again beside the new ones"
        assert replace(config, topup="search", topup_args={}) == NeuronALConfig(0.7, saliency="wanda")
        assert replace(NeuronALConfig(0.7, saliency="wanda"), topup="neuronal", steps="row").steps == "row"

    def test_the_signature_tells_the_fields(self):
        import inspect

        parameters = inspect.signature(NeuronALConfig).parameters
        assert list(parameters) == [entry.name for entry in fields(NeuronALConfig)]
        with pytest.raises(TypeError, match="positional"):
            NeuronALConfig(0.7, "wanda", {}, "neuronal", {}, "block")
        with pytest.raises(TypeError, match="'stesp'"):
            NeuronALConfig(0.7, stesp="block", steps="block", saliency="wanda")


class TestConfigsThatWereSavedBefore:
    @pytest.fixture(autouse=True)
    def said(self, monkeypatch):
        said = []
        monkeypatch.setattr("optimum_neuronal.config_aliases.logger.warning", said.append)
        return said

    def test_defaults(self, said):
        config = NeuronALConfig.from_dict(SAVED_BEFORE)
        assert config == NeuronALConfig(0.7, topup="neuronal", saliency="wanda") and not said
        assert NeuronALConfig.from_dict(config.to_dict()) == config

    @pytest.mark.parametrize("topup", ["search", "owl"])
    def test_defaults_of_another_topup_are_dropped_silently(self, topup, said):
        config = NeuronALConfig.from_dict({**SAVED_BEFORE, "topup": topup})
        assert config == NeuronALConfig(0.7, topup=topup, saliency="wanda") and config.topup_args == {} and not said

    def test_what_had_no_effect_is_said_again(self, said):
        config = NeuronALConfig.from_dict({**SAVED_BEFORE, "topup": "uniform", "steps": "block"})
        assert config == NeuronALConfig(0.7, topup="uniform", saliency="wanda")
        assert said == [
            "steps='block' has no effect: the top-up 'uniform' does not use it, but topup='neuronal' does."
        ]

    def test_topup_args_were_what_counted(self):
        saved = {**SAVED_BEFORE, "topup_args": {"steps": "block", "metric": "kl"}}
        config = NeuronALConfig.from_dict(saved)
        assert config.make_methods().topup == NeuronAL(steps="block", metric="kl")

    @pytest.mark.parametrize(
        "saved", [SAVED_BEFORE, NeuronALConfig(0.7, topup="neuronal", steps="block", saliency="wanda").to_dict()]
    )
    def test_keyword_arguments_override(self, saved):
        assert NeuronALConfig.from_dict(saved, steps="row").steps == "row"
        assert NeuronALConfig.from_dict(saved, topup_args={"steps": "row"}).steps == "row"


@pytest.mark.parametrize(
    "fields, topup",
    [({}, "search"), ({"effort": "fast"}, "owl"), ({"sparsity": 0.5, "pattern": "2:4"}, "uniform")],
)
def test_what_has_no_effect_is_told_of_the_topup_that_is_meant(fields, topup, monkeypatch):
    said = []
    monkeypatch.setattr("optimum_neuronal.config_aliases.logger.warning", said.append)
    config = NeuronALConfig(**{"sparsity": 0.7, "steps": "block", **fields})
    assert config.topup == topup and len(said) == 1 and f"the top-up {topup!r} does not use it" in said[0]
    with pytest.raises(ValueError, match="effort is 'fats'"):
        NeuronALConfig(0.7, effort="fats", steps="block")
