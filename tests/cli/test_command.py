import argparse
import io
import signal
import sys
from functools import partial

import huggingface_hub
import pytest

from optimum_neuronal.cli.command import Command, write


class Sample(Command):
    NAME = "sample"
    error = None

    def work(self):
        raise self.error

    def after_interrupt(self):
        return ": nothing is lost"


def run(error, **flags):
    command = Sample(argparse.Namespace(**{"debug": False, "quiet": False, **flags}))
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


def interrupt():
    raise KeyboardInterrupt  # SIGINT itself is ignored by jobs in the background


@pytest.mark.parametrize(("stop", "status"), [(interrupt, 130), (partial(signal.raise_signal, signal.SIGTERM), 143)])
def test_an_interrupted_command_ends_with_one_line(stop, status, capsys):
    before = signal.getsignal(signal.SIGTERM)

    class Stopped(Sample):
        def work(self):
            stop()

    with pytest.raises(SystemExit) as caught:
        Stopped(argparse.Namespace(debug=False, quiet=False)).run()
    assert caught.value.code == status and capsys.readouterr().err == "sample: interrupted: nothing is lost\n"
    assert signal.getsignal(signal.SIGTERM) == before


def test_other_errors_and_debug_show_where():
    with pytest.raises(ValueError, match="bad"):
        run(ValueError("bad"), debug=True)
    with pytest.raises(KeyError, match="unforeseen"):
        run(KeyError("unforeseen"))


def test_without_a_connection_an_error_comes_at_once(monkeypatch, tmp_path):
    """Unless the model is in the cache."""
    for name, value in (("HF_HUB_OFFLINE", False), ("ENDPOINT", "http://127.0.0.1:1"), ("HF_HUB_CACHE", tmp_path)):
        monkeypatch.setattr(huggingface_hub.constants, name, value)
    with pytest.raises(SystemExit, match="http://127.0.0.1:1 cannot be reached: .* set HF_HUB_OFFLINE=1"):
        run(None, model="me/llama")
    commit = tmp_path / "models--me--llama" / "snapshots" / "abc"
    commit.mkdir(parents=True)
    (commit / "config.json").write_text("{}")
    with pytest.raises(SystemExit, match="at work"):
        run(ValueError("at work"), model="me/llama", revision="abc")


def test_what_is_written_does_not_steer_the_terminal(monkeypatch):
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="ascii"))
    write("Modèle\n\x1b[2J")
    assert shown.getvalue() == b"Mod\\xe8le\n\\x1b[2J\n"
