import argparse

import pytest
from optimum.commands.base import CommandInfo
from transformers.utils import logging

from optimum_neuronal.cli.command import Command, write


class Sample(Command):
    COMMAND = CommandInfo(name="sample", help="For tests.")

    def after_interrupt(self):
        return ": nothing is lost"


def run(raises):
    command = Sample(argparse.ArgumentParser().add_subparsers())

    def work():
        raise raises

    command.work = work
    command.run()


@pytest.mark.parametrize("error", [ValueError, TypeError, FileNotFoundError, RuntimeError, MemoryError, ImportError])
def test_an_expected_error_is_told_in_one_line(error):
    with pytest.raises(SystemExit) as stop:
        run(error("first line\n  second line"))
    assert stop.value.code == "sample: error: first line second line (TRANSFORMERS_VERBOSITY=debug shows where)"


def test_its_origin_is_shown_to_who_asks(monkeypatch):
    told = []
    logger = logging.get_logger("optimum_neuronal.cli.command")
    monkeypatch.setattr(logger, "debug", lambda *args, **options: told.append(options))
    with pytest.raises(SystemExit):
        run(ValueError("bad"))
    assert told == [{"exc_info": True}]


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
