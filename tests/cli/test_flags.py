import argparse
from dataclasses import fields

import huggingface_hub
import pytest
import torch

from optimum_neuronal import NeuronALConfig
from optimum_neuronal.cli.flags import (
    CONFIG_FLAGS,
    add_config_flags,
    add_model_flags,
    device_of,
    given_fields,
    load_options,
)
from optimum_neuronal.common.torch_state import default_device
from optimum_neuronal.saliency import SALIENCIES
from optimum_neuronal.topup import TOPUPS


def parse(*words):
    parser = argparse.ArgumentParser()
    add_model_flags(parser)
    return parser.parse_args(["--model", "me/llama", *words])


def test_flags_are_read_as_the_types_of_their_fields():
    parser = argparse.ArgumentParser()
    add_config_flags(parser)
    flags = "--sparsity 0.7 --seed 3 --seq-length 16 --targets q_proj mlp --pattern 2:4 --topup owl:m=7"
    expected = {"sparsity": 0.7, "seed": 3, "seq_length": 16, "targets": ["q_proj", "mlp"], "pattern": "2:4"}
    assert given_fields(parser.parse_args(flags.split())) == {**expected, "topup": "owl:m=7"}


@pytest.mark.parametrize("command", ["prune", "compare"])
def test_every_field_has_a_flag_with_the_configs_default(run, capsys, command):
    without = [entry.name for entry in fields(NeuronALConfig) if entry.name not in CONFIG_FLAGS]
    assert without == ["saliency_args", "topup_args"]
    with pytest.raises(SystemExit) as stop:
        run(command, "--help")
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert all(", ".join(registry.names()) in " ".join(shown.split()) for registry in (SALIENCIES, TOPUPS))
    for line in shown.split("\n  --")[1:]:
        assert "(default:" in line or "(required" in line, line


def test_how_a_model_is_loaded():
    assert load_options(parse()) == {"dtype": "auto", "revision": "main", "trust_remote_code": False}
    given = parse("--dtype", "bfloat16", "--revision", "v2", "--trust-remote-code")
    assert load_options(given) == {"dtype": "bfloat16", "revision": "v2", "trust_remote_code": True}


def test_without_a_connection_only_cached_files_are_asked_for(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:1")
    assert load_options(parse())["local_files_only"] is True
    assert device_of(parse("--device", "meta")) == torch.device("meta") and device_of(parse()) == default_device()
