import json
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
import torch

from optimum_neuronal import NeuronALConfig
from optimum_neuronal.config.neuronal_config import read_config_file
from optimum_neuronal.config.presets import PRESETS


def test_fields_have_plain_defaults():
    config = NeuronALConfig(0.7)
    assert (config.saliency, config.topup, config.refit_epochs) == ("alps", "uniform", 0)
    assert (config.num_samples, config.num_alignment_samples, config.seed, config.dataset) == (128, 8, 0, "c4")
    assert replace(config, num_samples=4).num_alignment_samples == 8, "all four are used"
    with pytest.raises(AttributeError, match=r"use dataclasses.replace\(config, topup=...\)"):
        config.topup = "uniform"


class TestPresets:
    @pytest.mark.parametrize("name", PRESETS)
    def test_each_is_a_config_and_overrides_replace_fields(self, name):
        config = NeuronALConfig.preset(name, **{"sparsity": 0.6, **PRESETS[name]})
        assert all(getattr(config, field) == value for field, value in PRESETS[name].items())
        assert NeuronALConfig.preset(name, sparsity=config.sparsity, seed=2) == replace(config, seed=2)

    def test_the_papers_defaults(self):
        config = NeuronALConfig.preset("paper", sparsity=0.6)
        topup = config.methods.topup
        assert (config.saliency, config.dataset, config.num_samples, topup.variant) == ("wanda", "c4", 128, "authors")
        assert config.add_bos is False, "the authors put none before the windows of a Gemma either"
        assert topup.steps == "both" and len(topup.block_lambdas) == 14 and len(topup.row_lambdas) == 15

    def test_the_papers_preset_takes_its_variant_of_every_method(self):
        """So does one whose other hyperparameters are given; methods without such a variant are as always."""
        for given, title in (
            ({}, "wanda + neuronal, authors, block and row steps"),
            (
                {"topup_args": {"block_lambdas": [0.15]}},
                "wanda + neuronal, authors, block and row steps, block_lambdas=[0.15]",
            ),
            ({"topup": "neuronal", "topup_args": {"steps": "block"}}, "wanda + neuronal, authors, block step"),
            ({"topup": "owl"}, "wanda + owl, authors"),
            ({"topup": "owl", "topup_args": {"half_width": 0.1}}, "wanda + owl, authors, half_width=0.1"),
            ({"topup": "uniform", "saliency": "magnitude"}, "magnitude + uniform, authors"),
            ({"topup": "dlp"}, "wanda + dlp"),
            ({"topup": None}, "wanda + neuronal, sequence, block step"),
            ({"saliency": "sparsegpt"}, "sparsegpt, authors + neuronal, authors, block step"),
            ({"topup_args": {"variant": "sequence"}}, "wanda + neuronal, sequence, block step"),
        ):
            assert NeuronALConfig.preset("paper", sparsity=0.6, **given).methods.title == title
        assert NeuronALConfig.preset("fast", sparsity=0.6, topup="owl").methods.title == "alps + owl"

    def test_titles_name_variant_steps_pattern_and_refit(self):
        for given, title in (
            ({"topup": "neuronal"}, "alps + neuronal, sequence, block step"),
            ({"saliency": "wanda", "topup_args": {"row_lambdas": [0.1]}}, "wanda + neuronal, sequence, block and row steps, row_lambdas=[0.1]"),
            ({"topup": "uniform", "refit_epochs": 2}, "alps + uniform, refit of 2 epochs"),
            ({"topup": "uniform", "pattern": "2:4"}, "alps + uniform, pattern 2:4"),
            ({"saliency": "wanda", "topup": "dsnot"}, "wanda + dsnot"),
            ({"saliency": "sparsegpt", "topup_args": {"steps": "row"}}, "sparsegpt + neuronal, sequence, no step"),
        ):  # fmt: skip
            assert NeuronALConfig(0.5, **given).methods.title == title

    def test_an_unknown_one(self):
        with pytest.raises(ValueError, match="preset is 'papr': expected one of 'paper', .* Did you mean 'paper'"):
            NeuronALConfig.preset("papr", sparsity=0.6)


@pytest.mark.parametrize(
    "given",
    [
        {"saliency": "multiflow", "topup_args": {"steps": "block", "block_lambdas": (0.1, 0.2)}},
        {"saliency": "alps", "refit_epochs": 3, "refit_learning_rate": 1e-4, "targets": ["mlp"]},
        {"sparsity": 0.5, "pattern": "2:4", "topup": "uniform"},
    ],
)
def test_it_survives_json(given):
    config = NeuronALConfig(**{"sparsity": 0.7, **given})
    stored = json.loads(json.dumps(config.to_dict()))
    assert stored["quant_method"] == "neuronal" and NeuronALConfig.from_dict(stored) == config
    assert NeuronALConfig.from_dict(stored, seed=5) == replace(config, seed=5) != config


@pytest.mark.parametrize(
    ("stored", "given", "message"),
    [
        ({"xyz": 0.7}, {}, "a field of NeuronALConfig is 'xyz': expected one of 'sparsity', 'saliency', "),
        ({"sparsity": 0.7}, {"salency": "wanda"}, "field of NeuronALConfig is 'salency': .* Did you mean 'saliency'"),
        ({"sparsity": 0.7, "quant_method": "gptq"}, {}, "config is for 'gptq'"),
    ],
)
def test_unknown_keys_and_other_methods(stored, given, message):
    with pytest.raises(ValueError, match=message):
        NeuronALConfig.from_dict(stored, **given)
    with pytest.raises(TypeError, match="^The config has no sparsity: expected a share of zeros, such as 0.7"):
        NeuronALConfig.from_dict({"seed": 1})


# Fields beside or instead of sparsity 0.7, Wanda and NeuronAL -> the error's message.
BAD_VALUES = [
    ({"sparsity": 1.0}, "sparsity is 1.0: expected a share in"),
    ({"sparsity": float("nan")}, "sparsity is nan"),
    ({"sparsity": 70}, "Did you mean 0.7?"),
    ({"saliency": "wnada"}, "saliency is 'wnada': expected one of .*Did you mean 'wanda'?"),
    ({"topup_args": {"steps": "rows"}}, "Did you mean 'row'?"),
    ({"topup_args": {"metrik": "l2"}}, "'metrik'.*Did you mean 'metric'?"),
    ({"saliency_args": {"alpha": 1}}, "'alpha': the saliency 'wanda' takes no hyperparameters"),
    ({"num_samples": 0}, "num_samples is 0: expected a whole number of at least 1"),
    ({"seq_length": 1}, "seq_length is 1: expected a whole number of at least 2"),
    ({"targets": ["mlp", "("]}, "targets\\[1\\] is not a valid regular expression: '\\('"),
    ({"refit_epochs": 2}, "refit_epochs is 2, but the saliency 'wanda' does not update weights"),
    ({"refit_epochs": 1, "saliency": "alps", "num_samples": 15}, "num_samples is 15: a refit needs at least 16"),
    ({"refit_dtype": "float16"}, "refit_dtype is 'float16': expected one of 'float32', 'bfloat16'"),
    ({"refit_learning_rate": 0}, "refit_learning_rate is 0: expected a number above 0"),
    ({"saliency": "alps", "topup": "dsnot"}, "'alps' updates them: .*such as 'wanda'"),
    ({"sparsity": 0.5, "pattern": "2:4", "topup": "dsnot"}, "nothing for the top-up 'dsnot' to decide: set topup='u"),
    ({"pattern": "2:4", "topup": "uniform"}, "The pattern 2:4 means sparsity=0.5, but it is 0.7: set sparsity=0.5"),
    ({"sparsity": 0.5, "pattern": "2-4", "topup": "uniform"}, "expected 'N:M'"),
]
BAD_TYPES = [
    ({"saliency": None}, "saliency is None: expected one of 'alps"),
    ({"sparsity": "0.7"}, "sparsity is '0.7': expected a share"),
    ({"refit_epochs": 1.5}, "refit_epochs is 1.5: expected a whole number"),
    ({"dataset": [["text"]]}, "dataset is a list: .*prune\\(model, dataset=...\\)"),
    ({"ignore": "lm_head"}, "ignore is 'lm_head': expected a list, such as"),
    ({"topup_args": "budget=12"}, "topup_args is 'budget=12': expected a dict of hyperparameters"),
    ({"topup_args": {"block_lambdas": [Decimal("0.1")]}}, "topup_args is .*block_lambdas.*expected numbers, text"),
]


@pytest.mark.parametrize(
    ("error", "given", "message"),
    [*((ValueError, *case) for case in BAD_VALUES), *((TypeError, *case) for case in BAD_TYPES)],
)
def test_mistakes_raise_an_error_that_says_what_to_do(error, given, message):
    with pytest.raises(error, match=message):
        NeuronALConfig(**{"sparsity": 0.7, "saliency": "wanda", "topup": "neuronal", **given})


@pytest.mark.parametrize("value", [np.float32(0.5), np.float64(0.5), torch.tensor(0.5)], ids=str)
def test_numbers_become_pythons_own(value):
    config = NeuronALConfig(value, "ria", {"power": value}, "neuronal", {"block_lambdas": [value, 0.1]})
    assert NeuronALConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    numbers = [config.sparsity, config.saliency_args["power"], config.topup_args["block_lambdas"][0]]
    assert numbers == [0.5] * 3 and {type(number) for number in numbers} == {float}
    config = NeuronALConfig(0.5, num_samples=np.int64(32), seq_length=torch.tensor(16))
    assert (config.num_samples, config.seq_length) == (32, 16) and json.dumps(config.to_dict())


FIELDS = {"sparsity": 0.7, "topup": "owl", "topup_args": {"half_width": 0.1}}
FILES = {
    "fields": FIELDS,
    "neuronal_report.json": {"config": FIELDS, "achieved_sparsity": 0.7},
    "config.json": {"model_type": "llama", "sparsity_config": {"config": FIELDS}},
}


@pytest.mark.parametrize("content", FILES.values(), ids=FILES)
def test_fields_are_read(tmp_path, content):
    path = tmp_path / "file.json"
    path.write_text(json.dumps(content))
    assert read_config_file(path) == FIELDS
    assert NeuronALConfig.from_json_file(path, seed=3) == NeuronALConfig(**FIELDS, seed=3)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "a.json is not valid JSON"),
        (b"[" * 100_000, "a.json is not valid JSON"),
        (b"0.7", "a.json has no fields"),
    ],
)
def test_files_that_are_not_configs(tmp_path, content, message):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        NeuronALConfig.from_json_file(tmp_path / "a.json")


def test_one_dataset_or_several():
    for given, kept in ((["c4"], "c4"), ([], None), (("c4", Path("own.jsonl")), ["c4", "own.jsonl"])):
        config = NeuronALConfig(0.5, dataset=given)
        assert config.to_dict()["dataset"] == kept and NeuronALConfig.from_dict(config.to_dict()) == config
    assert config.dataset_names == ["c4", "own.jsonl"] and NeuronALConfig(0.5, dataset=None).dataset_names == []
    with pytest.raises(ValueError, match="num_samples is 1: expected at least one for each of 2 datasets"):
        NeuronALConfig(0.5, dataset=["c4", "ptb"], num_samples=1)


@pytest.mark.parametrize(
    "saliency, topup, needed",
    [
        ("magnitude", "uniform", False),
        ("wanda", "uniform", True),
        ("magnitude", "owl", True),
        ("magnitude", "dsnot", True),  # its allocation asks nothing, but it exchanges weights
    ],
)
def test_what_looks_at_no_activation_needs_no_calibration(saliency, topup, needed):
    assert NeuronALConfig(0.7, saliency, topup=topup).methods.needs_calibration is needed


@pytest.mark.parametrize(
    ("given", "topup"),
    [
        ({"sparsity": 0.7}, "uniform"),
        ({"sparsity": 0.5, "saliency": "wanda"}, "neuronal"),
        ({"sparsity": 0.5, "topup": "neuronal"}, "neuronal"),
        ({"sparsity": 0.5, "topup_args": {"block_lambdas": [0.1]}}, "neuronal"),
        ({"sparsity": 0.5, "saliency": "wanda", "pattern": "2:4"}, "uniform"),
    ],
)
def test_the_top_up_without_a_name(given, topup):
    """NeuronAL's candidates are masks, which choose badly for updated weights."""
    assert NeuronALConfig(**given).topup == topup
