import json
from dataclasses import fields, replace
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from optimum_neuronal import NeuronALConfig
from optimum_neuronal.config.config_fields import explain
from optimum_neuronal.config.neuronal_config import read_config_file


def test_defaults():
    config = NeuronALConfig(0.7)
    assert (config.saliency, config.topup, config.refit_epochs, config.dataset) == (None, None, None, "c4")
    found = config.resolved()
    assert (found.saliency, found.topup, found.refit_epochs, found.rotate) == ("alps", "search", 0, True)
    assert found == config == found.resolved()
    assert config.make_methods().needs_dense_stream
    assert NeuronALConfig(0.7, "sparsegpt").make_methods().topup.name == "search", "which leaves rows alone then"


class TestEffort:
    def test_it_fills_in_what_is_not_given(self):
        assert NeuronALConfig(0.7, effort="default") == NeuronALConfig(0.7)
        best = NeuronALConfig(0.7, effort="best").resolved()
        assert (best.saliency, best.topup, best.refit_epochs > 0) == ("alps", "search", True)
        assert NeuronALConfig(0.7, effort="fast").resolved().topup != "search"

    def test_what_is_given_wins(self):
        config = NeuronALConfig(0.7, effort="best", topup="owl", refit_epochs=3).resolved()
        assert (config.saliency, config.topup, config.refit_epochs) == ("alps", "owl", 3)
        config = NeuronALConfig(0.7, effort="best", saliency="wanda").resolved()
        assert (config.topup, config.refit_epochs) == ("search", 0), "Wanda leaves the weights that stay"
        assert NeuronALConfig(0.5, effort="best", pattern="2:4").resolved().topup == "uniform"
        config = NeuronALConfig(0.7, effort="best", topup="besa").resolved()
        assert (config.saliency, config.refit_epochs) == ("wanda", 0), "BESA decides while the other weights stay"

    def test_what_is_saved_says_what_was_meant(self):
        saved = NeuronALConfig(0.7, effort="best").resolved().to_dict()
        assert saved["effort"] == "best" and saved["saliency"] == "alps" and saved["refit_epochs"] > 0
        assert NeuronALConfig.from_dict({**saved, "refit_epochs": 2}).refit_epochs == 2

    def test_what_is_not_given_follows_what_is_replaced(self):
        config = replace(NeuronALConfig(0.7, effort="best"), topup="besa")
        assert (config.saliency, config.resolved().saliency) == (None, "wanda")
        assert replace(config, topup=None, pattern="2:4", sparsity=0.5).resolved().topup == "uniform"


def test_defaults_of_neuronal_are_the_papers():
    config = NeuronALConfig(0.7, topup="neuronal", saliency="wanda").resolved()
    assert (config.num_samples, config.num_alignment_samples, config.seed) == (128, 8, 0)
    topup = config.make_methods().topup
    assert topup.steps == "both" and len(topup.block_lambdas) == 14 and len(topup.row_lambdas) == 15


def test_round_trip_through_json():
    config = NeuronALConfig(
        0.7,
        "multiflow",
        topup="neuronal",
        topup_args={"steps": "block", "block_lambdas": (0.1, 0.2)},
        targets=["mlp"],
        seq_length=64,
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
    with pytest.raises(ValueError, match="no field 'xyz'. Known: sparsity, saliency, .*, rotate_args"):
        NeuronALConfig.from_dict({"xyz": 0.7})
    with pytest.raises(TypeError, match="no argument 'salency'. Did you mean 'saliency'"):
        NeuronALConfig.from_dict({"sparsity": 0.7}, salency="wanda")
    with pytest.raises(ValueError, match="config of 'gptq'"):
        NeuronALConfig.from_dict({"quant_method": "gptq", "sparsity": 0.7})


def test_the_alignment_sequences_follow_the_calibration_sequences():
    for samples, aligned in ((4, 4), (8, 8), (64, 8)):
        config = NeuronALConfig(0.7, saliency="wanda", num_samples=samples)
        assert config.num_alignment_samples is None and config.resolved().num_alignment_samples == aligned
        assert replace(config, num_samples=2).resolved().num_alignment_samples == 2
    assert NeuronALConfig(0.7, num_alignment_samples=3).resolved().num_alignment_samples == 3


def test_reconstruction_is_off_unless_it_is_asked_for():
    config = NeuronALConfig(0.7)
    assert (config.reconstruct, config.resolved().refit_epochs, config.refit_learning_rate) == (None, 0, 0.04)
    config = NeuronALConfig(0.7, "alps", reconstruct="block", refit_epochs=3, refit_learning_rate=1e-4)
    assert NeuronALConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert NeuronALConfig.from_dict({"sparsity": 0.7, "saliency": "alps"}) != config
    assert NeuronALConfig(0.7, "alps", num_samples=15).num_samples == 15, "which no refit asks more of"


BITS = {"sparsity": None, "saliency": None, "topup": None, "bits_per_weight": 2.4}
# Fields beside or instead of sparsity 0.7 -> the message that refuses them.
BAD_VALUES = [
    ({"sparsity": 1.0}, "sparsity is 1.0: expected a share in"),
    ({"sparsity": -0.1}, "sparsity is -0.1"),
    ({"sparsity": float("nan")}, "sparsity is nan"),
    ({"sparsity": 70}, "Did you mean 0.7?"),
    ({"saliency": "wnada"}, "Unknown saliency 'wnada'. Did you mean 'wanda'?"),
    ({"topup": "neuroal"}, "Unknown top-up 'neuroal'. Did you mean 'neuronal'?"),
    ({"topup_args": {"steps": "rows"}}, "Did you mean 'row'?"),
    ({"topup_args": {"block_lambdas": []}}, "block_lambdas is"),
    ({"topup_args": {"metrik": "l2"}}, "topup_args holds 'metrik'.*Did you mean 'metric'?"),
    ({"saliency_args": {"alpha": 1}}, "saliency_args holds 'alpha', which the saliency 'wanda' does not have"),
    ({"effort": "bets"}, "effort is 'bets': expected one of 'fast', .*Did you mean 'best'"),
    ({"num_samples": 0}, "num_samples is 0: expected a whole number of at least 1"),
    ({"seq_length": 1}, "seq_length is 1: expected a whole number of at least 2"),
    ({"num_alignment_samples": 200}, "num_alignment_samples is 200, more than num_samples=128"),
    ({"targets": ["("]}, "targets holds '\\(', which is no regular expression"),
    ({"reconstruct": "dens"}, "reconstruct is 'dens': expected one of 'dense', 'block'.*Did you mean 'dense'"),
    ({"reconstruct": ""}, "reconstruct is ''"),
    ({"reconstruct": "dense"}, "reconstruct is 'dense', but the saliency 'wanda' leaves"),
    ({"refit_epochs": -1}, "refit_epochs is -1: expected a whole number of at least 0"),
    ({"refit_epochs": 2}, "refit_epochs is 2, but the saliency 'wanda' leaves the kept weights"),
    ({"refit_epochs": 1, "saliency": "alps", "num_samples": 15}, "num_samples is 15: to refit takes at least 16"),
    ({"refit_learning_rate": 0}, "refit_learning_rate is 0: expected a number above 0"),
    ({"refit_learning_rate": -1e-4}, "refit_learning_rate is -0.0001"),
    ({"refit_learning_rate": float("nan")}, "refit_learning_rate is nan"),
    ({"refit_learning_rate": float("inf")}, "refit_learning_rate is inf"),
    ({"topup": "owl:half_width=0.1", "topup_args": {"half_width": 0.2}},
     "half_width is given twice and differently: topup='owl:half_width=0.1', but topup_args holds 0.2"),
    ({"topup": "neuronal:steps=block", "topup_args": {"steps": "row"}}, "steps is given twice and differently"),
    ({"topup": "owl:half_width"}, "'owl:half_width' is no method: expected NAME or NAME:KEY=VALUE"),
    ({"topup": "owl:half_widht=0.1"}, "topup_args holds 'half_widht'.*Did you mean 'half_width'"),
    ({"bits_per_weight": 2}, "bits_per_weight is 2: expected a number above 2, at most 9"),
    ({"bits_per_weight": 10}, "at most 9"),
    ({"bits_per_weight": float("nan")}, "bits_per_weight is nan"),
    ({"bits_per_weight": 2.4}, "sparsity=0.7 and bits_per_weight=2.4 are given, but a prune either .*: leave one out"),
    ({**BITS, "saliency": "wanda"}, "saliency is 'wanda', which is for weights that are set to zero, but bits_per_weight=2.4"),
    ({**BITS, "saliency_args": {"power": 1}}, "saliency_args is {'power': 1}, which is for weights that are set to zero"),
    ({**BITS, "pattern": "2:4"}, "pattern is '2:4', which is for weights"),
    ({**BITS, "reconstruct": "dense"}, "reconstruct is 'dense', which is for weights"),
    ({**BITS, "refit_epochs": 2}, "refit_epochs is 2, which is for weights"),
    ({**BITS, "topup": "owl"}, "topup is 'owl', which divides a sparsity: with bits_per_weight, expected 'uniform', or None"),
    ({**BITS, "topup": "owl:m=7"}, "topup_args is {'m': 7}, which is for weights"),
    ({**BITS, "rotate": True}, "rotate is True, but a rotation serves weights that are set to zero"),
    ({**BITS, "embedding_bits": 4}, "embedding_bits is 4: expected 8"),
]  # fmt: skip
BAD_TYPES = [
    ({"refit_epochs": 1.5}, "refit_epochs is 1.5: expected a whole number"),
    ({"refit_learning_rate": "fast"}, "refit_learning_rate is 'fast': expected a number above 0"),
    ({"topup": "search", "topup_args": {"budget": "12"}}, "budget is '12': expected a whole number of at least 8"),
    ({"effort": 5}, "effort is 5: expected one of"),
    ({"embedding_bits": "8"}, "embedding_bits is '8': expected 8, or None"),
    ({"sparsity": "0.7"}, "sparsity is '0.7': expected a number"),
    ({"sparsity": True}, "expected a number"),
    ({"seed": 1.5}, "seed is 1.5: expected a whole number"),
    ({"dataset": ["text"]}, "dataset is a list: .*prune\\(model, dataset=...\\)"),
    ({"ignore": "lm_head"}, "ignore is 'lm_head': expected several, such as"),
    ({"ignore": 5}, "ignore is 5: expected several, such as"),
    ({"bits_per_weight": "2.4"}, "bits_per_weight is '2.4': expected a number"),
    ({"bits_per_weight": True}, "bits_per_weight is True: expected a number"),
    ({"topup_args": 5}, "topup_args is 5: expected a dict of hyper-parameters"),
    ({"topup_args": "budget=12"}, "topup_args is 'budget=12': expected a dict of hyper-parameters"),
    ({"saliency_args": ["power"]}, "saliency_args is .*: expected a dict"),
    ({"topup_args": {"block_lambdas": [Decimal("0.1")]}}, "topup_args holds block_lambdas=.*expected numbers, text"),
    ({"topup_args": {"block_lambdas": {0.1}}}, "topup_args holds block_lambdas=.*expected numbers, text"),
    ({"topup_args": {"block_lambdas": [object]}}, "topup_args holds block_lambdas=.*expected numbers, text"),
]


@pytest.mark.parametrize("error, refused", [(ValueError, BAD_VALUES), (TypeError, BAD_TYPES)])
def test_what_is_refused(error, refused):
    for given, message in refused:
        with pytest.raises(error, match=message):
            NeuronALConfig(**{"sparsity": 0.7, "saliency": "wanda", "topup": "neuronal", **given})


def test_every_field_is_documented():
    for entry in fields(NeuronALConfig):
        (line,) = (line for line in NeuronALConfig.__doc__.split("\n") if line.startswith(f"        {entry.name} (`"))
        assert line.endswith(f": {explain(entry)}.") and entry.metadata["help"]


def test_patterns_and_hyper_parameters_may_come_from_generators():
    config = NeuronALConfig(
        0.5, ignore=(f"layers.{i}" for i in (0, 1)), targets=(name for name in ("mlp",)), saliency="wanda"
    )
    assert config.ignore == ["layers.0", "layers.1"] and config.targets == ["mlp"]
    config = NeuronALConfig(
        0.5, topup="neuronal", topup_args={"block_lambdas": (i / 10 for i in (1, 2))}, saliency="wanda"
    )
    assert config.topup_args == {"block_lambdas": [0.1, 0.2]} and config.make_methods().topup.block_lambdas == (
        0.1,
        0.2,
    )


NUMBERS = [np.float32(0.5), np.float64(0.5), torch.tensor(0.5), Fraction(1, 2)]


@pytest.mark.parametrize("value", NUMBERS, ids=[type(value).__name__ for value in NUMBERS])
def test_numbers_of_any_kind_become_pythons_own(value):
    config = NeuronALConfig(
        value, "ria", {"power": value}, "neuronal", {"block_lambdas": [value, 0.1]}, refit_learning_rate=value
    )
    stored = json.loads(json.dumps(config.to_dict()))
    assert NeuronALConfig.from_dict(stored) == config
    numbers = [
        config.sparsity,
        config.refit_learning_rate,
        config.saliency_args["power"],
        config.topup_args["block_lambdas"][0],
    ]
    assert numbers == [0.5] * 4 and {type(number) for number in numbers} == {float}
    assert "float" not in f"{config.to_dict()}" and "tensor" not in f"{config.to_dict()}"


def test_whole_numbers_of_any_kind():
    config = NeuronALConfig(0.5, num_samples=np.int64(32), seq_length=torch.tensor(16), seed=np.int32(3))
    assert (config.num_samples, config.seq_length, config.seed) == (32, 16, 3)
    assert json.loads(json.dumps(config.to_dict()))["seed"] == 3


def test_no_hyper_parameters():
    expected = NeuronALConfig(0.5)
    assert NeuronALConfig(0.5, saliency_args=None, topup_args=None).to_dict() == expected.to_dict()
    assert NeuronALConfig.from_dict({"sparsity": 0.5, "topup_args": None, "saliency_args": None}) == expected


def test_names_that_are_none():
    for name in ("effort", "saliency", "topup", "reconstruct"):
        for value, error in ((5, TypeError), (["wanda"], TypeError), ({"a": 1}, TypeError), ("", ValueError)):
            with pytest.raises(error, match=f"{name} is|Unknown|top-up is"):
                NeuronALConfig(0.5, **{name: value})


def test_a_methods_name_with_hyper_parameters_means_what_it_does_on_the_command_line():
    config = NeuronALConfig(0.5, "ria:power=1.0", topup="owl:half_width=0.1", dataset="me/text:train:column")
    assert (config.saliency, config.saliency_args) == ("ria", {"power": 1.0})
    assert (config.topup, config.topup_args) == ("owl", {"half_width": 0.1})
    assert config == NeuronALConfig.from_dict({**config.to_dict(), "topup": "owl:half_width=0.1"})
    both = NeuronALConfig(0.5, "wanda", topup="neuronal:block_lambdas=(0.1, 0.2)", topup_args={"steps": "block"})
    assert both.topup_args == {"steps": "block", "block_lambdas": [0.1, 0.2]}
    assert both == NeuronALConfig(0.5, "wanda", topup="neuronal:steps=block,block_lambdas=[0.1,0.2]")


def test_a_budget_takes_the_place_of_a_sparsity():
    config = NeuronALConfig(bits_per_weight=2.4)
    assert (config.sparsity, config.bits_per_weight, config.amount) == (None, 2.4, 2.4)
    assert NeuronALConfig(0.7).amount == 0.7
    assert NeuronALConfig.from_dict(config.to_dict()) == config
    with pytest.raises(
        TypeError, match="needs a sparsity, such as 0.7, to set weights to zero, or bits, such as bits_per_w"
    ):
        NeuronALConfig()


@pytest.mark.parametrize(
    ("fields", "topup", "by"),
    [
        ({}, None, "divergence"),
        ({"effort": "fast"}, "uniform", "uniform"),
        ({"effort": "best"}, None, "divergence"),
        ({"topup": "uniform"}, "uniform", "uniform"),
    ],
    ids=str,
)
def test_what_quantises(fields, topup, by):
    """What is saved after a prune quantises alike again."""
    config = NeuronALConfig(bits_per_weight=2.4, **fields)
    resolved, methods = config.resolved(), config.make_methods()
    assert (resolved.saliency, resolved.topup, resolved.refit_epochs) == (None, topup, 0)
    assert (methods.topup.budget, methods.topup.by) == (2.4, by)
    assert methods.needs_calibration and methods.needs_dense_stream and methods.saliency.updates_weights
    assert NeuronALConfig.from_dict(resolved.to_dict()) == resolved == config
    assert NeuronALConfig(bits_per_weight=2.5, **fields) != config


FIELDS = {"sparsity": 0.7, "topup": "owl", "topup_args": {"half_width": 0.1}}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("recipe.json", json.dumps(FIELDS)),
        ("recipe.yaml", "sparsity: 0.7\ntopup: owl\ntopup_args:\n  half_width: 0.1\n"),
        ("neuronal_report.json", json.dumps({"config": FIELDS, "achieved_sparsity": 0.7})),
    ],
)
def test_fields_are_read(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    assert read_config_file(tmp_path / name) == FIELDS
    assert NeuronALConfig.from_json_file(tmp_path / name) == NeuronALConfig(**FIELDS)


def test_a_name_is_the_packages_recipe_wherever_one_is(tmp_path, monkeypatch, caplog):
    """A file of that name in the working directory is read by its path alone, and a warning names it."""
    monkeypatch.chdir(tmp_path)
    ours = NeuronALConfig.from_json_file("balanced")
    assert not caplog.text
    Path("balanced").write_text('{"sparsity": 0.1}')
    assert NeuronALConfig.from_json_file("balanced") == ours != NeuronALConfig(0.1)
    assert "write './balanced' for the file in the working directory" in caplog.text
    caplog.clear()
    for path in ("./balanced", Path("balanced"), tmp_path / "balanced"):
        assert NeuronALConfig.from_json_file(path) == NeuronALConfig(0.1)
    assert not caplog.text


def test_fields_that_are_given_replace_the_recipes():
    assert NeuronALConfig.from_json_file("quick-look", sparsity=0.6, seed=3) == NeuronALConfig.from_dict(
        {**read_config_file("quick-look"), "sparsity": 0.6, "seed": 3}
    )
    with pytest.raises(TypeError, match="Did you mean 'sparsity'"):
        NeuronALConfig.from_json_file("quick-look", sparsty=0.6)


def test_an_unknown_recipe_lists_those_that_exist():
    with pytest.raises(FileNotFoundError, match="balanced, best-quality, .*, two-four. Did you mean 'quick-look'"):
        NeuronALConfig.from_json_file("quick-lok")


def test_what_is_written_is_read(tmp_path):
    config = NeuronALConfig(sparsity=0.6, effort="best", ignore=["q_proj"])
    config.to_json_file(tmp_path / "config.json")
    assert NeuronALConfig.from_json_file(tmp_path / "config.json") == config


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b"{", "a.json cannot be read"),
        ("a.yaml", b"sparsity: [", "a.yaml cannot be read"),
        ("a.json", b"\xff", "a.json cannot be read"),
        ("a.yaml", b"!!python/object/apply:os.getcwd []", "a.yaml cannot be read"),
        ("a.yaml", b"0.7", "holds no fields"),
        ("a.yaml", b"1: 2", "holds no fields"),
        ("a.json", b'{"sparsty": 0.7}', "Did you mean 'sparsity'"),
    ],
)
def test_files_that_are_no_recipes(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        NeuronALConfig.from_json_file(tmp_path / name)


@pytest.mark.parametrize("name", ["deep.json", "deep.yaml"])
def test_files_of_too_many_brackets_are_refused_in_words(tmp_path, name):
    (tmp_path / name).write_text("[" * 100_000)
    with pytest.raises(ValueError, match=f"{name} cannot be read: lists and objects lie in each other too deep"):
        read_config_file(tmp_path / name)


class TestRotation:
    def test_an_effort_rotates_with_the_saliency_that_it_chooses(self):
        """What is named is as it was published."""
        rotated = {
            effort: NeuronALConfig(0.7, effort=effort).resolved().rotate for effort in ("fast", "default", "best")
        }
        assert rotated == {"fast": False, "default": True, "best": True}
        for named in (
            {"saliency": "alps"},
            {"saliency": "sparsegpt", "effort": "best"},
            {"topup": "besa"},  # which goes with Wanda
            {"rotate": False},
        ):
            resolved = NeuronALConfig(0.7, **named).resolved()
            assert resolved.rotate is False and resolved.make_methods().rotation is None, named
        assert NeuronALConfig(0.7, topup="owl").resolved().rotate is True
        assert NeuronALConfig(bits_per_weight=3, effort="best").resolved().rotate is False
        config = NeuronALConfig(0.7)
        assert (config.rotate, config.rotate_args) == (None, {})
        assert config.make_methods().rotation.untie is False, "a model stays as large as it was"

    def test_it_has_hyper_parameters(self):
        rotation = NeuronALConfig(0.7, rotate=True, rotate_args={"steps": 3}).make_methods().rotation
        assert (rotation.steps, rotation.cut, rotation.weights, rotation.untie) == (3, 0.7, "fisher", True)

    @pytest.mark.parametrize(
        "arguments, error, message",
        [
            (
                {"step": 3},
                ValueError,
                "rotate_args holds 'step': expected one of steps, learning_rate, cut.*mean 'steps'",
            ),
            ({"steps": 0}, ValueError, "steps is 0: expected a whole number of at least 1"),
            ({"steps": 1.5}, TypeError, "steps is 1.5: expected a whole number"),
            ({"learning_rate": 0}, ValueError, "learning_rate is 0: expected a number above 0"),
            ({"cut": 1.1}, ValueError, "cut is 1.1: expected a number above 0, at most 1"),
            ({"weights": "fischer"}, ValueError, "weights is 'fischer': .* 'fisher'"),
            ({"fisher_samples": 0}, ValueError, "fisher_samples is 0"),
            ({"untie": 0}, TypeError, "untie is 0: expected True or False"),
            ({"rows": 0}, ValueError, "rows is 0: expected a number above 0, at most 1"),
            ("steps=3", TypeError, "rotate_args is "),
        ],
    )
    def test_wrong_arguments_are_refused_in_words(self, arguments, error, message):
        with pytest.raises(error, match=message):
            NeuronALConfig(0.7, rotate=True, rotate_args=arguments)

    def test_arguments_without_a_rotation(self):
        with pytest.raises(
            ValueError, match="rotate_args is {'steps': 3}, but rotate is None: set rotate=True, or leave"
        ):
            NeuronALConfig(0.7, rotate_args={"steps": 3})
        for rotate in (1, "true"):
            with pytest.raises(TypeError, match="rotate is .*: expected True or False"):
                NeuronALConfig(0.7, rotate=rotate)

    def test_there_and_back(self, tmp_path):
        config = NeuronALConfig(0.7, rotate=True, rotate_args={"steps": 3, "untie": False})
        assert NeuronALConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
        config.to_json_file(tmp_path / "config.json")
        assert NeuronALConfig.from_json_file(tmp_path / "config.json").rotate_args == {"steps": 3, "untie": False}
        (tmp_path / "config.yaml").write_text(
            "sparsity: 0.7\nrotate: true\nrotate_args:\n  steps: 3\n  untie: false\n"
        )
        assert NeuronALConfig.from_json_file(tmp_path / "config.yaml") == config

    @pytest.mark.parametrize(("sparsity", "cut"), [(0.7, 0.7), (0.3, 0.5), (0.95, 0.9)])
    def test_the_threshold_cuts_what_the_prune_does(self, sparsity, cut):
        """Within bounds, and unless the caller says otherwise."""
        assert NeuronALConfig(sparsity, rotate=True).make_methods().rotation.cut == cut
        given = NeuronALConfig(sparsity, rotate=True, rotate_args={"cut": 0.6})
        assert given.make_methods().rotation.cut == 0.6

    def test_equal_is_what_rotates_alike(self):
        config = NeuronALConfig(0.7, rotate=True)
        assert config == NeuronALConfig(0.7, rotate=True, rotate_args={"steps": 150, "cut": 0.7})
        assert config != NeuronALConfig(0.7) and config != replace(config, rotate_args={"steps": 151})

    def test_it_looks_at_activations(self):
        plain = {"saliency": "magnitude", "topup": "uniform"}
        assert NeuronALConfig(0.7, rotate=True, **plain).make_methods().needs_calibration
