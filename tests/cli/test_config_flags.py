import argparse
import subprocess
import sys
from dataclasses import fields

import pytest

from optimum_neuronal import NeuronALConfig
from optimum_neuronal.cli.config_flags import CONFIG_FLAGS, add_config_flags, given_fields, methods
from optimum_neuronal.saliency import SALIENCIES
from optimum_neuronal.topup import TOPUPS
from optimum_neuronal.topup.neuronal import NeuronAL


def test_flags_are_read_as_the_types_of_their_fields():
    parser = argparse.ArgumentParser()
    add_config_flags(parser)
    read = {flag: given_fields(parser.parse_args(["--sparsity", "0.7", *flag.split()])) for flag in (
        "--seed 3", "--seq-length 16", "--targets q_proj mlp", "--row-lambdas 0 0.1", "--pattern 2:4", "--topup owl:m=7",
    )}  # fmt: skip
    assert [{**values, "sparsity": None} for values in read.values()] == [
        {"sparsity": None, "seed": 3},
        {"sparsity": None, "seq_length": 16},
        {"sparsity": None, "targets": ["q_proj", "mlp"]},
        {"sparsity": None, "row_lambdas": [0.0, 0.1]},
        {"sparsity": None, "pattern": "2:4"},
        {"sparsity": None, "topup": "owl", "topup_args": {"m": 7}},
    ]
    assert all(values["sparsity"] == 0.7 for values in read.values())


def test_parsers_are_built_without_torch():
    """`optimum-cli` builds those of all plug-ins at every start."""
    code = (
        "import argparse, sys; from optimum_neuronal.cli.neuronal_command import NeuronalCommand\n"
        "NeuronalCommand(argparse.ArgumentParser().add_subparsers())\n"
        "print({'torch', 'transformers', 'numpy'} & sys.modules.keys())"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"


def test_the_help_names_every_method():
    assert methods("saliency").split(", ") == SALIENCIES.names()
    assert methods("topup").split(", ") == TOPUPS.names()


def test_every_field_has_a_flag_with_the_configs_default(run, capsys):
    flags = {name: default for name, (default, _, _) in CONFIG_FLAGS.items()}
    described = {
        "seq_length",
        "batch_size",
        "max_hidden_bytes",
        "targets",
        "ignore",
        "pattern",
        "saliency",
        "topup",
        "reconstruct",
        "refit_epochs",
        "value_bits",
        "bits_per_weight",
        "sparsity",
        "embedding_bits",
    }  # None there, told in words here
    without_flag = {"saliency_args", "topup_args"}  # dicts, for Python
    for entry in fields(NeuronALConfig):
        if entry.name in without_flag:
            continue
        shown = flags.pop(entry.name)
        if entry.name in described:
            assert entry.default is None
        else:
            assert shown == str(entry.default)
    for entry in fields(NeuronAL):  # those that are understood as if they were fields of the config
        if isinstance(entry.default, tuple):
            assert [float(value) for value in flags.pop(entry.name).split()] == list(entry.default)
        elif entry.name in flags:
            assert flags.pop(entry.name) == str(entry.default)
    assert not flags
    with pytest.raises(SystemExit) as stop:
        run("prune", "--help")
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for line in text.split("\n  --")[1:]:
        assert "(default:" in line or "(required" in line, line
