import argparse
import subprocess
import sys
from dataclasses import fields

import pytest

from optimum_neuronal import NeuronALConfig
from optimum_neuronal.cli.config_flags import CONFIG_FLAGS, add_config_flags, given_fields, methods
from optimum_neuronal.saliency import SALIENCIES
from optimum_neuronal.topup import TOPUPS


def test_flags_are_read_as_the_types_of_their_fields():
    parser = argparse.ArgumentParser()
    add_config_flags(parser)
    read = {flag: given_fields(parser.parse_args(["--sparsity", "0.7", *flag.split()])) for flag in (
        "--seed 3", "--seq-length 16", "--targets q_proj mlp", "--pattern 2:4", "--topup owl:m=7",
    )}  # fmt: skip
    assert [{**values, "sparsity": None} for values in read.values()] == [
        {"sparsity": None, "seed": 3},
        {"sparsity": None, "seq_length": 16},
        {"sparsity": None, "targets": ["q_proj", "mlp"]},
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
    assert [entry.name for entry in fields(NeuronALConfig) if entry.name not in CONFIG_FLAGS] == [
        "saliency_args",
        "topup_args",
    ]
    for name, entry in CONFIG_FLAGS.items():
        assert (entry.default is None) == ("unset" in entry.metadata), f"{name}: None is explained in words"
    with pytest.raises(SystemExit) as stop:
        run("prune", "--help")
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for line in text.split("\n  --")[1:]:
        assert "(default:" in line or "(required" in line, line
