import argparse
import re
from dataclasses import fields

import pytest
import torch

from optimum_neuronal import NeuronALConfig
from optimum_neuronal.cli import flags
from optimum_neuronal.cli.flags import (
    CONFIG_FLAGS,
    DEVICES,
    add_config_flags,
    add_model_flags,
    add_test_flags,
    count,
    device,
    device_of,
    dtype,
    given_fields,
    load_options,
    methods,
    share,
)
from optimum_neuronal.common.machine import default_device
from optimum_neuronal.saliency import SALIENCIES
from optimum_neuronal.topup import TOPUPS


def parse(*words):
    parser = argparse.ArgumentParser()
    add_model_flags(parser)
    add_test_flags(parser)
    return parser.parse_args(["--model", "me/llama", *words])


def test_devices_are_torch_s(monkeypatch):
    """A package that brings another device to torch says so as a package; torch then decides."""
    with pytest.raises(RuntimeError) as error:
        torch.device("tpu")
    named = re.search("Expected one of (.*) device type", str(error.value))[1].split(", ")
    assert set(named) == set(DEVICES)
    monkeypatch.setattr(flags, "entry_points", lambda group: ["torch_npu"] if group == "torch.backends" else [])
    assert device("npu:0") == "npu:0"


def test_words_are_read():
    for read, text, value in (
        (share, "0.7", 0.7),
        (share, "0", 0),
        (count, "3", 3),
        (dtype, "fp32", "float32"),
        (dtype, "BF16", "bfloat16"),
        (dtype, "half", "float16"),
        (dtype, "torch.float32", "float32"),
        (dtype, "auto", "auto"),
        (device, "cpu", "cpu"),
        (device, "cuda:1", "cuda:1"),
    ):
        assert read(text) == value, text
    for read, text, message in (
        (share, "70", "Did you mean 0.7?"),
        (share, "1", "expected a share"),
        (share, "much", "'much'"),
        (share, "nan", "nan"),
        (count, "0", "'0': expected a whole number of at least 1"),
        (dtype, "flaot32", "Did you mean 'float32'"),
        (device, "tpu", "'tpu': expected cpu, cuda, cuda:1, mps, xpu or another device of torch"),
        (device, "no-such-device", "'no-such-device': expected"),
        (device, "coda", "Did you mean 'cuda'"),
        (device, "cuda:one", "'cuda:one': expected"),
        (device, "cuda:", "'cuda:': expected"),
        (device, "", "'': expected"),
    ):
        with pytest.raises(argparse.ArgumentTypeError, match=message):
            read(text)


def test_flags_of_the_config_are_read_as_the_types_of_their_fields():
    parser, several = argparse.ArgumentParser(), argparse.ArgumentParser()
    add_config_flags(parser)
    for flag, values in (
        ("--seed 3", {"seed": 3}),
        ("--seq-length 16", {"seq_length": 16}),
        ("--targets q_proj mlp", {"targets": ["q_proj", "mlp"]}),
        ("--pattern 2:4", {"pattern": "2:4"}),
        ("--topup owl:m=7", {"topup": "owl", "topup_args": {"m": 7}}),
    ):
        given = given_fields(parser.parse_args(["--sparsity", "0.7", *flag.split()]))
        assert given == {"sparsity": 0.7, **values}
    defaults = {"sparsity": "0.6", "topup": "owl", "bits_per_weight": "none"}
    add_config_flags(several, list(defaults), defaults)
    given = several.parse_args(["--sparsity", "0.5", "0.6", "--topup", "owl:m=7", "--bits-per-weight", "2.4", "3"])
    expected = {"sparsity": [0.5, 0.6], "topup": ["owl:m=7"], "bits_per_weight": [2.4, 3.0]}
    assert vars(given) == expected == given_fields(given)


def test_every_field_has_a_flag_with_the_configs_default(run, capsys):
    assert methods("saliency").split(", ") == SALIENCIES.names()
    assert methods("topup").split(", ") == TOPUPS.names()
    without = [entry.name for entry in fields(NeuronALConfig) if entry.name not in CONFIG_FLAGS]
    assert without == ["saliency_args", "topup_args", "rotate_args"]
    for name, entry in CONFIG_FLAGS.items():
        assert (entry.default is None) == ("unset" in entry.metadata), f"{name}: None is explained in words"
    groups = ["model", "result", "how much", "methods", "calibration text", "rarely needed"]
    for command in ("prune", "compare"):
        with pytest.raises(SystemExit) as stop:
            run(command, "--help")
        assert stop.value.code == 0
        shown = capsys.readouterr().out
        for line in shown.split("\n  --")[1:]:
            assert "(default:" in line or "(required" in line, line
        if command == "prune":  # in groups, what is rarely needed last
            places = [shown.index(f"\n{group}:\n") for group in groups]
            assert places == sorted(places) and shown.index("--sparsity SHARE", places[2]) < places[3]
            assert shown.index("\n  --max-hidden-bytes") > shown.index("\n  --min-expert-tokens") > places[-1]


def test_how_a_model_is_loaded():
    assert load_options(parse()) == {"dtype": "auto", "revision": "main", "trust_remote_code": False}
    given = parse("--dtype", "bfloat16", "--revision", "v2", "--trust-remote-code")
    assert load_options(given) == {"dtype": "bfloat16", "revision": "v2", "trust_remote_code": True}
    assert device_of(parse("--device", "meta")) == torch.device("meta") and device_of(parse()) == default_device()
    given = parse("--tasks", "boolq", "rte", "--limit", "40")
    assert (given.tasks, given.limit, given.include_path) == (["boolq", "rte"], 40, None)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="one of them is there")
def test_a_device_that_is_not_there():
    for name in ("cuda", "cuda:99", "mps", "xpu"):
        message = f"--device {name}: torch .* cannot compute there .*Leave --device out for cpu"
        with pytest.raises(ValueError, match=message):
            device_of(parse("--device", name))
