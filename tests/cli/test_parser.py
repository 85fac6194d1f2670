import argparse
import subprocess
import sys

import pytest

from optimum_neuronal.cli.parser import CommandParser, add_verbosity_flags, describe, dtype, share, value_bits


def make_parser():
    parser = CommandParser("tool")
    parser.add_argument("--dataset")
    return parser


@pytest.mark.parametrize("flag", ["--datset", "--datset=c4"])
def test_an_unknown_flag_is_told_with_the_closest_and_its_own_usage(flag, capsys):
    with pytest.raises(SystemExit) as stop:
        make_parser().parse_known_args([flag, "c4"])
    assert stop.value.code == 2
    told = capsys.readouterr().err
    assert told.startswith("usage: tool")
    assert "Did you mean '--dataset'?" in told


def test_a_word_too_many(capsys):
    with pytest.raises(SystemExit):
        make_parser().parse_args(["--dataset", "c4", "more"])
    assert "unrecognized argument: more." in capsys.readouterr().err


def test_the_help_describes_and_gives_examples():
    parser = make_parser()
    describe(parser, "--dataset NAME", "What it does.", ("--dataset c4", ""))
    told = parser.format_help()
    assert told.startswith("usage: tool --dataset NAME\n\nWhat it does.")
    assert told.endswith("examples:\n  tool --dataset c4\n  tool\n")


def test_flags_of_every_command():
    parser = make_parser()
    add_verbosity_flags(parser)
    assert vars(parser.parse_args(["--quiet"])) == {"dataset": None, "quiet": True, "debug": False}


@pytest.mark.parametrize(
    ("text", "message"), [("70", "Did you mean 0.7?"), ("1", "expected a share"), ("much", "'much'"), ("nan", "nan")]
)
def test_no_share(text, message):
    with pytest.raises(argparse.ArgumentTypeError, match=message):
        share(text)


def test_a_share():
    assert (share("0.7"), share("0")) == (0.7, 0)


def test_a_wrong_sparsity_is_told_without_torch():
    code = (
        "import sys; from optimum_neuronal.__main__ import main\n"
        "sys.argv = ['optimum-cli', 'neuronal', 'prune', '--model', 'x', '--sparsity', '70']\n"
        "try: main()\n"
        "except SystemExit: print('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "False"
    assert "Did you mean 0.7?" in result.stderr


@pytest.mark.parametrize(
    ("text", "meant"),
    [("fp32", "float32"), ("BF16", "bfloat16"), ("half", "float16"), ("torch.float32", "float32"), ("auto", "auto")],
)
def test_dtypes_by_their_short_names(text, meant):
    assert dtype(text) == meant


def test_an_unknown_dtype_names_the_closest():
    with pytest.raises(argparse.ArgumentTypeError, match="Did you mean 'float32'"):
        dtype("flaot32")


def test_bits_of_values():
    assert (value_bits("none"), value_bits("4")) == (None, 4)
    with pytest.raises(argparse.ArgumentTypeError, match="'four': expected a number of bits, such as 4, or none"):
        value_bits("four")
