import argparse
import re
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from optimum_neuronal import NeuronALConfig
from optimum_neuronal.cli import flags
from optimum_neuronal.cli.flags import (
    CONFIG_FLAGS,
    add_config_flags,
    add_model_flags,
    device_of,
    given_fields,
    load_options,
)
from optimum_neuronal.cli.neuronal_command import COMMANDS, make_parsers
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


@pytest.mark.parametrize("command", ["neuronal", *(one.NAME for one in COMMANDS)])
def test_every_flag_of_every_command_shows_its_default(command):
    """In the page that `--help` shows, which is what the parser would show: `make style` renders it."""
    page = (Path(flags.__file__).with_name("help") / f"{command}.txt").read_text()
    assert page == make_parsers()[command].format_help()
    for line in page.split("\n  --")[1:]:
        default = re.search(r"\((?:default:|required)\s*([^()]|\([^()]*\))*\)", line)
        assert default and not re.search("MISSING|None|<|==", default[0]) or line.startswith("version"), line


def test_every_field_has_a_flag():
    without = [entry.name for entry in fields(NeuronALConfig) if entry.name not in CONFIG_FLAGS]
    assert without == ["saliency_args", "topup_args"]
    for command in ("prune", "compare"):
        shown = " ".join(make_parsers()[command].format_help().split())
        assert all(", ".join(registry.names()) in shown for registry in (SALIENCIES, TOPUPS))
        assert all(f"--{name.replace('_', '-')} " in shown for name in {*CONFIG_FLAGS} - {"pattern", "add_bos"})


NEEDLESS = (
    ("prune --model x --output y --private", "--private changes nothing without --push-to-hub"),
    ("finetune --model x --output y --private", "--private changes nothing without --push-to-hub"),
    ("prune --model x --output y --window 8", "--window changes nothing without --evaluate"),
    ("finetune --model x --output y --max-windows 8", "--max-windows changes nothing without --evaluate"),
    ("prune --model x --output y --sparsity 0.5 --refit-learning-rate 0.1", "Flags of the refit change nothing"),
    ("prune --model x --output y --stream --device-map auto", "--stream changes nothing with --device-map"),
    ("evaluate --model x --device cpu --device-map auto", "--device changes nothing with --device-map"),
    ("evaluate --model x --include-path y", "--include-path changes nothing without --tasks"),
    ("evaluate --model x --apply-chat-template", "--apply-chat-template changes nothing without --tasks"),
    ("evaluate --model x --tasks y --window 8", "change nothing without test text: name it with --dataset"),
    ("compare --merge x --sparsity 0.5", "--merge prunes nothing and takes --output alone"),
    ("finetune --model . --output y --teacher z --kl-weight 0", "--teacher changes nothing with --kl-weight 0"),
    ("inspect . --revision v2", "--revision changes nothing for a model that is not on the Hub"),
)


@pytest.mark.parametrize(("words", "message"), NEEDLESS)
def test_flags_that_change_nothing_are_errors(run, words, message):
    with pytest.raises(SystemExit, match=f"error: .*{message}"):
        run(*words.split())


def test_how_a_model_is_loaded():
    assert load_options(parse()) == {"dtype": "auto", "revision": "main", "trust_remote_code": False}
    given = parse("--dtype", "bfloat16", "--revision", "v2", "--trust-remote-code")
    assert load_options(given) == {"dtype": "bfloat16", "revision": "v2", "trust_remote_code": True}
    assert device_of(parse("--device", "meta")) == torch.device("meta") and device_of(parse()) == default_device()
