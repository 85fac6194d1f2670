import argparse
import io
import sys

import pytest
from huggingface_hub.utils import are_progress_bars_disabled
from optimum.commands.base import CommandInfo
from transformers.utils import logging

from optimum_neuronal.cli.command import Command, write
from optimum_neuronal.system.notes import get_logger


class Sample(Command):
    COMMAND = CommandInfo(name="sample", help="For tests.")

    def after_interrupt(self):
        return ": nothing is lost"


def run_with(work, debug=False, quiet=False):
    args = argparse.Namespace(debug=debug, quiet=quiet)
    command = Sample(argparse.ArgumentParser().add_subparsers(), args)
    command.work = work
    command.run()


def run(raises, **flags):
    def work():
        raise raises

    run_with(work, **flags)


@pytest.mark.parametrize("error", [RuntimeError, MemoryError, ImportError])
def test_an_expected_error_is_told_in_one_line(error):
    with pytest.raises(SystemExit) as stop:
        run(error("first line\n  second line"))
    assert stop.value.code == "sample: error: first line second line (--debug shows where)"


@pytest.mark.parametrize("error", [ValueError, TypeError, FileNotFoundError])
def test_bad_input_explains_itself(error):
    with pytest.raises(SystemExit) as stop:
        run(error("x is 1: expected 2."))
    assert stop.value.code == "sample: error: x is 1: expected 2."


def test_an_error_without_words_is_named():
    with pytest.raises(SystemExit) as stop:
        run(MemoryError())
    assert stop.value.code == "sample: error: MemoryError (--debug shows where)"


def test_its_origin_is_shown_to_who_asks():
    with pytest.raises(ValueError, match="bad"):
        run(ValueError("bad"), debug=True)


def test_quiet_silences_notes_and_bars_for_the_time_being():
    def look():
        return (
            logging.get_verbosity(),
            logging.is_progress_bar_enabled(),
            are_progress_bars_disabled(),
            get_logger("optimum_neuronal.sample").getEffectiveLevel(),
        )

    before, seen = look(), []
    run_with(lambda: seen.append(look()), quiet=True)
    assert seen == [(logging.ERROR, False, True, logging.ERROR)]
    assert look() == before


def test_an_error_steers_no_terminal():
    with pytest.raises(SystemExit) as stop:
        run(ValueError("\x1b[2Jmodel.layers\u202e"))
    assert stop.value.code.startswith(r"sample: error: \x1b[2Jmodel.layers\u202e")


def test_a_fault_of_the_program_is_shown_whole():
    with pytest.raises(KeyError, match="unforeseen"):
        run(KeyError("unforeseen"))


def test_an_interrupt_says_what_becomes_of_the_work():
    with pytest.raises(SystemExit) as stop:
        run(KeyboardInterrupt())
    assert stop.value.code == "sample: interrupted: nothing is lost"


def test_a_line_is_written_at_once(capsys):
    write("two\nlines")
    assert capsys.readouterr().out == "two\nlines\n"


def test_lines_are_shown_in_any_encoding_and_steer_nothing(monkeypatch):
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="ascii"))
    write("Saved to Modèle.\n  \x1b[2J\udcc3")
    assert shown.getvalue() == b"Saved to Mod\\xe8le.\n  \\x1b[2J\\udcc3\n"
