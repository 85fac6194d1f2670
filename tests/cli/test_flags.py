import argparse

import pytest
import torch

from optimum_neuronal.cli.flags import add_model_flags, add_task_flags, device_of, load_options
from optimum_neuronal.system.machine import default_device


def parse(*flags):
    parser = argparse.ArgumentParser()
    add_model_flags(parser)
    add_task_flags(parser)
    return parser.parse_args(["--model", "me/llama", *flags])


def test_what_is_handed_to_from_pretrained():
    assert load_options(parse()) == {"dtype": "auto", "revision": "main", "trust_remote_code": False}
    given = parse("--dtype", "bfloat16", "--revision", "v2", "--trust-remote-code")
    assert load_options(given) == {"dtype": "bfloat16", "revision": "v2", "trust_remote_code": True}


def test_a_device_is_the_one_that_was_named_or_the_default():
    assert device_of(parse("--device", "meta")) == torch.device("meta")
    assert device_of(parse()) == default_device()


@pytest.mark.skipif(torch.accelerator.is_available(), reason="one of them is there")
@pytest.mark.parametrize("device", ["cuda", "cuda:99", "mps", "xpu", "no-such-device", "cpu:x"])
def test_a_device_that_is_not_there(device):
    with pytest.raises(
        ValueError, match=f"--device {device}: torch .* cannot compute there .*Leave --device out for cpu"
    ):
        device_of(parse("--device", device))


def test_tasks_are_several_and_their_limit_a_number():
    given = parse("--tasks", "boolq", "rte", "--limit", "40")
    assert (given.tasks, given.limit, given.include_path) == (["boolq", "rte"], 40, None)
    assert parse().tasks == []


def test_the_model_has_to_be_named(capsys):
    parser = argparse.ArgumentParser()
    add_model_flags(parser)
    with pytest.raises(SystemExit):
        parser.parse_args([])
    assert "required: --model" in capsys.readouterr().err
