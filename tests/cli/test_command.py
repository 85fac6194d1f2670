import argparse
import io
import sys

import pytest

from optimum_neuronal.cli.command import Command, write


class Sample(Command):
    NAME = "sample"
    error = None

    def work(self):
        raise self.error

    def unfinished(self):
        return "."


def run(error, debug=False):
    command = Sample(argparse.Namespace(debug=debug, quiet=False, parser=argparse.ArgumentParser()))
    command.error = error
    command.run()


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (RuntimeError("first line\n  second line"), "error: first line second line (--debug shows where)"),
        (MemoryError(), "error: MemoryError (--debug shows where)"),
        (ValueError("x is 1: expected 2."), "error: x is 1: expected 2."),
        (ValueError("\x1b[2Jmodel.layers\u202e"), r"error: \x1b[2Jmodel.layers\u202e"),
    ],
)
def test_expected_errors_are_one_line(error, line):
    with pytest.raises(SystemExit) as stop:
        run(error)
    assert stop.value.code == f"sample: {line}"


def test_an_interrupted_command_ends_with_one_line(capsys):
    with pytest.raises(SystemExit, match="130"):
        run(KeyboardInterrupt())
    line = "sample: interrupted: the same command resumes from here; to start over, delete .\n"
    assert capsys.readouterr().err == line


def test_other_errors_and_debug_show_where():
    with pytest.raises(ValueError, match="bad"):
        run(ValueError("bad"), debug=True)
    with pytest.raises(KeyError, match="unforeseen"):
        run(KeyError("unforeseen"))


def test_what_is_written_does_not_steer_the_terminal(monkeypatch):
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="ascii"))
    write("Modèle\n\x1b[2J")
    assert shown.getvalue() == b"Mod\\xe8le\n\\x1b[2J\n"
