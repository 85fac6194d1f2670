import argparse
import io
import sys

import pytest
from huggingface_hub.utils import are_progress_bars_disabled
from optimum.commands.base import CommandInfo
from transformers.utils import logging

from optimum_neuronal.cli.command import Command, CommandParser, describe, write
from optimum_neuronal.common.notes import get_logger


class Sample(Command):
    COMMAND = CommandInfo(name="sample", help="For tests.")

    def after_interrupt(self):
        return ": nothing is lost"


def run(work, **flags):
    args = argparse.Namespace(**{"debug": False, "quiet": False, **flags})
    command = Sample(argparse.ArgumentParser().add_subparsers(), args)
    command.work = work
    command.run()


def raising(error):
    def work():
        raise error

    return work


def test_expected_errors_are_one_line():
    """Bad input explains itself; what failed on the way may be looked into."""
    for error, line in (
        (RuntimeError("first line\n  second line"), "error: first line second line (--debug shows where)"),
        (ImportError("no"), "error: no (--debug shows where)"),
        (MemoryError(), "error: MemoryError (--debug shows where)"),
        (ValueError("x is 1: expected 2."), "error: x is 1: expected 2."),
        (TypeError("x is 1: expected 2."), "error: x is 1: expected 2."),
        (FileNotFoundError("x is 1: expected 2."), "error: x is 1: expected 2."),
        (ValueError("\x1b[2Jmodel.layers\u202e"), r"error: \x1b[2Jmodel.layers\u202e"),
        (KeyboardInterrupt(), "interrupted: nothing is lost"),
    ):
        with pytest.raises(SystemExit) as stop:
            run(raising(error))
        assert stop.value.code == f"sample: {line}"
    with pytest.raises(ValueError, match="bad"):
        run(raising(ValueError("bad")), debug=True)
    with pytest.raises(KeyError, match="unforeseen"):
        run(raising(KeyError("unforeseen")))


def test_quiet_silences_notes_and_bars_for_the_time_being():
    def look():
        own = get_logger("optimum_neuronal.sample").getEffectiveLevel()
        return logging.get_verbosity(), logging.is_progress_bar_enabled(), are_progress_bars_disabled(), own

    before, seen = look(), []
    run(lambda: seen.append(look()), quiet=True)
    assert seen == [(logging.ERROR, False, True, logging.ERROR)] and look() == before


def test_lines_are_written_at_once_in_any_encoding_and_steer_nothing(capsys, monkeypatch):
    write("two\nlines")
    assert capsys.readouterr().out == "two\nlines\n"
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="ascii"))
    write("Saved to Modèle.\n  \x1b[2J\udcc3")
    assert shown.getvalue() == b"Saved to Mod\\xe8le.\n  \\x1b[2J\\udcc3\n"


def test_help_and_unknown_flags(capsys):
    parser = CommandParser("tool")
    parser.add_argument("--dataset")
    for words, message in (
        (["--datset", "c4"], "Did you mean '--dataset'?"),
        (["--datset=c4"], "Did you mean '--dataset'?"),
        (["--dataset", "c4", "more"], "unrecognized argument: more."),
    ):
        with pytest.raises(SystemExit) as stop:
            parser.parse_known_args(words)
        shown = capsys.readouterr().err
        assert stop.value.code == 2 and shown.startswith("usage: tool") and message in shown
    assert parser.parse_args(["--data=c4"]).dataset == "c4", "shortened"
    parser.add_argument("name", nargs="*")
    assert parser.parse_args(["--dataset", "c4", "--", "--datset"]).name == ["--datset"]
    parser.add_argument("--model", required=True)
    with pytest.raises(SystemExit):
        parser.parse_args(["--modle", "me/model"])
    assert "unrecognized argument: --modle. Did you mean '--model'?" in capsys.readouterr().err
    describe(parser, "--dataset NAME", "What it does.", ("--dataset c4", ""))
    shown = parser.format_help()
    assert shown.startswith("usage: tool --dataset NAME\n\nWhat it does.")
    assert shown.endswith("examples:\n  tool --dataset c4\n  tool\n")
