import copy
import json
import logging
import pickle
from dataclasses import asdict, fields, replace

import numpy as np
import pytest

from optimum_neuronal import NeuronALConfig
from optimum_neuronal.config_fields import ALIASES
from optimum_neuronal.topup import TOPUPS
from optimum_neuronal.topup.neuronal import LAMBDAS, NeuronAL


def test_defaults():
    config = NeuronALConfig(0.7)
    assert (config.saliency, config.topup, config.dataset) == ("wanda", "search", "c4")
    assert config.make_methods().topup.budget == 58, "the passes of NeuronAL's two steps"
    assert NeuronALConfig(0.7, "sparsegpt").make_methods().topup.name == "search", "which leaves rows alone then"


def test_defaults_of_neuronal_are_the_papers():
    config = NeuronALConfig(0.7, topup="neuronal")
    assert (config.num_samples, config.num_alignment_samples, config.seed) == (128, 8, 0)
    topup = config.make_methods().topup
    assert topup.steps == "both" and len(topup.block_lambdas) == 14 and len(topup.row_lambdas) == 15


def test_round_trip_through_json():
    config = NeuronALConfig(
        0.7, "multiflow", topup="neuronal", steps="block", block_lambdas=(0.1, 0.2), targets=["mlp"], seq_length=64
    )
    stored = json.loads(json.dumps(config.to_dict()))
    assert stored["quant_method"] == "neuronal"
    assert NeuronALConfig.from_dict(stored) == config
    assert NeuronALConfig.from_dict(stored, sparsity=0.5).sparsity == 0.5
    assert NeuronALConfig.from_dict(stored, return_unused_kwargs=True, other=1) == (config, {"other": 1})
    assert json.loads(config.to_json_string())["sparsity"] == 0.7


def test_unknown_keys_and_other_methods_are_refused():
    with pytest.raises(ValueError, match="no field 'sparsty'. Did you mean 'sparsity'"):
        NeuronALConfig.from_dict({"sparsty": 0.7})
    with pytest.raises(ValueError, match="config of 'gptq'"):
        NeuronALConfig.from_dict({"quant_method": "gptq", "sparsity": 0.7})


def test_topup_takes_what_it_knows():
    args = {"metric": "l2", "reference": "dense"}
    topup = NeuronALConfig(0.7, topup="neuronal", steps="row", topup_args=args).make_methods().topup
    assert (topup.steps, topup.reference) == ("row", "dense")
    assert NeuronALConfig(0.7, topup="uniform").make_methods().topup.name == "uniform"


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"sparsity": 1.0}, "sparsity is 1.0: expected a share in"),
        ({"sparsity": -0.1}, "sparsity is -0.1"),
        ({"sparsity": float("nan")}, "sparsity is nan"),
        ({"sparsity": 70}, "Did you mean 0.7?"),
        ({"saliency": "wnada"}, "Unknown saliency 'wnada'. Did you mean 'wanda'?"),
        ({"topup": "neuroal"}, "Unknown top-up 'neuroal'. Did you mean 'neuronal'?"),
        ({"steps": "rows"}, "Did you mean 'row'?"),
        ({"saliency_args": {"alpha": 1}}, "saliency_args holds 'alpha', which the saliency 'wanda' does not have"),
        ({"topup_args": {"metrik": "l2"}}, "topup_args holds 'metrik'.*Did you mean 'metric'?"),
        ({"num_samples": 0}, "num_samples is 0: expected at least 1"),
        ({"seq_length": 1}, "seq_length is 1: expected at least 2"),
        ({"num_alignment_samples": 200}, "num_alignment_samples is 200, more than num_samples=128"),
        ({"targets": ["("]}, "targets holds '\\(', which is no regular expression"),
        ({"format": "pickle"}, "format is 'pickle': expected one of 'dense'"),
        ({"block_lambdas": []}, "block_lambdas is"),
    ],
)
def test_bad_values(arguments, message):
    with pytest.raises(ValueError, match=message):
        NeuronALConfig(**{"sparsity": 0.7, "topup": "neuronal", **arguments})


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"sparsity": "0.7"}, "sparsity is '0.7': expected a number"),
        ({"sparsity": True}, "expected a number"),
        ({"seed": 1.5}, "seed is 1.5: expected a whole number"),
        ({"dataset": ["text"]}, "dataset is a list: .*prune\\(model, dataset=...\\)"),
        ({"ignore": "lm_head"}, "ignore is 'lm_head': expected a list of regular expressions"),
    ],
)
def test_bad_types(arguments, message):
    with pytest.raises(TypeError, match=message):
        NeuronALConfig(**{"sparsity": 0.7, **arguments})


def test_what_has_no_effect_is_said(caplog):
    logging.getLogger("transformers").propagate = True
    with caplog.at_level("WARNING"):
        NeuronALConfig(0.7, topup="uniform", steps="row")
    said = "steps='row' has no effect: the top-up 'uniform' does not use it, but topup='neuronal' does."
    assert said in caplog.text
    with pytest.raises(ValueError, match="Did you mean 'row'"):
        NeuronALConfig(0.7, steps="rows")
    caplog.clear()
    NeuronALConfig(0.7, topup="uniform")
    assert not caplog.records


def test_every_field_is_documented():
    for entry in fields(NeuronALConfig):
        assert f"\n        {entry.name} (`" in NeuronALConfig.__doc__ or f", {entry.name} (`" in NeuronALConfig.__doc__


class TestMethodsThatGoTogether:
    def test_sparsegpt_refuses_the_row_step(self):
        for steps in ("both", "row"):
            with pytest.raises(ValueError, match="updates all rows of a weight together.*set steps='block'"):
                NeuronALConfig(sparsity=0.7, saliency="sparsegpt", topup="neuronal", steps=steps)
        assert NeuronALConfig(sparsity=0.7, saliency="sparsegpt", topup="neuronal", steps="block")
        assert NeuronALConfig(sparsity=0.7, saliency="sparsegpt", topup="uniform")

    @pytest.mark.parametrize("topup", ["besa", "dsnot"])
    def test_topups_that_need_fixed_weights_refuse_sparsegpt(self, topup):
        with pytest.raises(ValueError, match="'sparsegpt' updates the others too.*such as 'wanda'"):
            NeuronALConfig(sparsity=0.7, saliency="sparsegpt", topup=topup)

    @pytest.mark.parametrize("topup", ["owl", "alpha_pruning", "dlp", "atp", "dsa", "evopress", "search"])
    def test_all_others_serve_it(self, topup):
        assert NeuronALConfig(sparsity=0.7, saliency="sparsegpt", topup=topup).make_methods().topup

    def test_a_pattern_refuses_other_topups_and_sparsities(self):
        with pytest.raises(ValueError, match="nothing for the top-up 'search' to decide: set topup='uniform'"):
            NeuronALConfig(sparsity=0.5, pattern="2:4")
        with pytest.raises(ValueError, match="The pattern 2:4 means sparsity=0.5, but it is 0.7"):
            NeuronALConfig(sparsity=0.7, pattern="2:4", topup="uniform")
        with pytest.raises(ValueError, match="expected 'N:M'"):
            NeuronALConfig(sparsity=0.5, pattern="2-4", topup="uniform")
        config = NeuronALConfig(sparsity=0.5, pattern="4:8", topup="uniform")
        assert NeuronALConfig.from_dict(config.to_dict()) == config

    @pytest.mark.parametrize("name", TOPUPS.names())
    def test_what_a_topup_declares_leaves_rows_alone(self, name):
        topup = NeuronALConfig(0.7, topup=name, topup_args=TOPUPS.get(name).without_rows).make_methods().topup
        assert topup.rows_are_optional or not topup.by_row
        NeuronALConfig(0.7, "wanda", topup=name, topup_args=topup.without_rows)

    def test_a_topup_that_cannot_leave_rows_alone_is_told_from_one_that_can(self, own_topup, monkeypatch):
        monkeypatch.setattr(own_topup, "by_row", True)
        with pytest.raises(ValueError, match="the top-up 'test-only' would have them: choose a top-up that leaves"):
            NeuronALConfig(0.7, "sparsegpt", topup="test-only")


def test_a_topup_gets_its_topup_args_and_nothing_else(own_topup):
    config = NeuronALConfig(0.7, topup="test-only", seed=7, batch_size=2)
    assert config.make_methods().topup == own_topup(batch_size=4, seed=123) and (config.seed, config.batch_size) == (
        7,
        2,
    )
    config = NeuronALConfig(0.7, topup="test-only", topup_args={"seed": 5, "shape": range(2)}, seed=7)
    assert config.make_methods().topup == own_topup(seed=5, shape=[0, 1]) and config.seed == 7
    assert NeuronALConfig.from_dict(config.to_dict(), seed=8).topup_args == {"seed": 5, "shape": [0, 1]}


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
        config = NeuronALConfig(0.7, topup="neuronal", steps="block", reference="dense")
        assert config.topup_args == {"steps": "block", "reference": "dense"}
        assert not ALIASES.keys() & {entry.name for entry in fields(config)}
        assert not ALIASES.keys() & asdict(config).keys() and not ALIASES.keys() & config.to_dict().keys()
        assert config.make_methods().topup == NeuronAL(steps="block", reference="dense")

    def test_the_table_tells_the_topups_own_hyper_parameters(self):
        for name, alias in ALIASES.items():
            for topup in alias.topups:
                own = {entry.name: entry.default for entry in fields(TOPUPS.get(topup))}
                assert own[name] == alias.default

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
        config, expected = (NeuronALConfig(0.7, topup="neuronal", **fields) for fields in (given, {"steps": "block"}))
        stored = json.loads(json.dumps(config.to_dict()))
        assert config == expected == NeuronALConfig.from_dict(stored) and stored == config.to_dict()

    def test_configs_that_differ_are_not_equal(self):
        config = NeuronALConfig(0.7, topup="neuronal", steps="block")
        others = ({"steps": "both"}, {"steps": "block", "seed": 1}, {"steps": "block", "saliency": "ria"})
        assert all(config != NeuronALConfig(0.7, topup="neuronal", **fields) for fields in others)
        assert config != config.to_dict()

    def test_what_contradicts_is_refused(self):
        with pytest.raises(
            ValueError, match="steps is given twice and differently: steps='row', but .* holds 'block'"
        ):
            NeuronALConfig(0.7, topup="neuronal", steps="row", topup_args={"steps": "block"})

    def test_a_bad_value_is_refused_whichever_the_topup(self):
        for topup in ("neuronal", "search"):
            with pytest.raises(ValueError, match="block_lambdas is"):
                NeuronALConfig(0.7, topup=topup, block_lambdas=[1.5])
        with pytest.raises(ValueError, match="Did you mean 'neuronal'"):
            NeuronALConfig(0.7, topup="neuroal", steps="block")

    def test_reading_one_gives_the_value_in_force(self):
        config = NeuronALConfig(0.7, topup="neuronal", steps="block", block_lambdas=[0.1])
        assert (config.steps, config.block_lambdas, config.reference) == ("block", (0.1,), "sparse-stream")
        other = NeuronALConfig(0.7, topup="search")
        assert not hasattr(other, "steps")
        with pytest.raises(
            AttributeError, match="steps is a hyper-parameter of topup='neuronal', but the .* 'search'"
        ):
            other.steps  # noqa: B018
        with pytest.raises(AttributeError, match=r"replace\(config, topup_args=\{'steps': 'row'\}\)"):
            config.steps = "row"

    def test_copies(self):
        config = NeuronALConfig(0.7, topup="neuronal", steps="block")
        for other in (copy.copy(config), copy.deepcopy(config), pickle.loads(pickle.dumps(config)), replace(config)):
            assert other == config and other.topup_args == {"steps": "block"}
        assert replace(config, sparsity=0.5) == NeuronALConfig(0.5, topup="neuronal", steps="block")
        assert replace(config, topup_args={}).steps == "both", "the old value is not given again beside the new ones"
        assert replace(config, topup="search", topup_args={}) == NeuronALConfig(0.7)
        assert replace(NeuronALConfig(0.7), topup="neuronal", steps="row").steps == "row"

    def test_the_signature_tells_the_fields(self):
        import inspect

        parameters = inspect.signature(NeuronALConfig).parameters
        assert list(parameters) == [entry.name for entry in fields(NeuronALConfig)]
        with pytest.raises(TypeError, match="positional"):
            NeuronALConfig(0.7, "wanda", {}, "neuronal", {}, "block")
        with pytest.raises(TypeError, match="'stesp'"):
            NeuronALConfig(0.7, stesp="block", steps="block")


class TestConfigsThatWereSavedBefore:
    @pytest.fixture(autouse=True)
    def said(self, monkeypatch):
        said = []
        monkeypatch.setattr("optimum_neuronal.config_aliases.logger.warning", said.append)
        return said

    def test_defaults(self, said):
        config = NeuronALConfig.from_dict(SAVED_BEFORE)
        assert config == NeuronALConfig(0.7, topup="neuronal") and not said
        assert NeuronALConfig.from_dict(config.to_dict()) == config

    @pytest.mark.parametrize("topup", ["search", "owl"])
    def test_defaults_of_another_topup_are_dropped_silently(self, topup, said):
        config = NeuronALConfig.from_dict({**SAVED_BEFORE, "topup": topup})
        assert config == NeuronALConfig(0.7, topup=topup) and config.topup_args == {} and not said

    def test_what_had_no_effect_is_said_again(self, said):
        config = NeuronALConfig.from_dict({**SAVED_BEFORE, "topup": "uniform", "steps": "block"})
        assert config == NeuronALConfig(0.7, topup="uniform")
        assert said == [
            "steps='block' has no effect: the top-up 'uniform' does not use it, but topup='neuronal' does."
        ]

    def test_topup_args_were_what_counted(self):
        saved = {**SAVED_BEFORE, "topup_args": {"steps": "block", "metric": "kl"}}
        config = NeuronALConfig.from_dict(saved)
        assert config.make_methods().topup == NeuronAL(steps="block", metric="kl")

    @pytest.mark.parametrize("saved", [SAVED_BEFORE, NeuronALConfig(0.7, topup="neuronal", steps="block").to_dict()])
    def test_keyword_arguments_override(self, saved):
        assert NeuronALConfig.from_dict(saved, steps="row").steps == "row"
        assert NeuronALConfig.from_dict(saved, topup_args={"steps": "row"}).steps == "row"


def test_patterns_and_hyper_parameters_may_come_from_generators():
    config = NeuronALConfig(0.5, ignore=(f"layers.{i}" for i in (0, 1)), targets=(name for name in ("mlp",)))
    assert config.ignore == ["layers.0", "layers.1"] and config.targets == ["mlp"]
    config = NeuronALConfig(0.5, topup="neuronal", topup_args={"block_lambdas": (i / 10 for i in (1, 2))})
    assert config.topup_args == {"block_lambdas": [0.1, 0.2]} and config.make_methods().topup.block_lambdas == (
        0.1,
        0.2,
    )
    with pytest.raises(TypeError, match="ignore is 5: expected a list of regular expressions"):
        NeuronALConfig(0.5, ignore=5)
