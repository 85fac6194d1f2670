"""The base of all commands of `optimum-cli neuronal`."""

import argparse
import os
import signal
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from transformers import PreTrainedModel
from transformers.utils import logging

from ..common.connection import check_connection
from ..common.display import escaped
from ..data.documents import check_datasets
from ..model.auto_classes import loading_code
from ..model.sources import GGUF, check_directory, find_gguf


EXPECTED = (ValueError, TypeError, OSError, RuntimeError, MemoryError, ImportError)


def write(text: str) -> None:
    """Write lines to the terminal. Control characters, and what its encoding does not know, are escaped."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    lines = "\n".join(map(escaped, text.split("\n")))
    sys.stdout.write(lines.encode(encoding, "backslashreplace").decode(encoding) + "\n")
    sys.stdout.flush()


@contextmanager
def stopped_by_sigterm() -> Iterator[None]:
    """Raise `KeyboardInterrupt`, with the signal's number, on SIGTERM too, so that a command ends as on Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, _frame: object) -> None:
        raise KeyboardInterrupt(number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def write_saved(model: PreTrainedModel, output: str, format: str, hint: str = "") -> None:
    """Write where a model is saved, with a hint, and how to load it."""
    write(f"\nSaved to {output}{hint}. Load it with:")
    if format == "packed":
        write("    import optimum_neuronal  # to load the packed format")
    write(f"    {loading_code(model, output)}")


class Command(ABC):
    """A command whose expected errors are one line."""

    NAME: ClassVar[str]
    HELP: ClassVar[str]
    USAGE: ClassVar[str] = "[flags]"  # the arguments that it needs, in a line
    EXAMPLES: ClassVar[tuple[str, ...]] = ()

    def __init__(self, args: argparse.Namespace):
        self.args = args

    def run(self) -> None:
        """Do the work. End the process with one line on an expected error, on Ctrl-C or on SIGTERM."""
        try:
            with stopped_by_sigterm():
                self._run()
        except EXPECTED as error:
            if self.args.debug:
                raise
            message = escaped(" ".join(str(error).split())) or type(error).__name__
            explained = isinstance(error, (ValueError, TypeError, OSError))
            sys.exit(f"{self.NAME}: error: {message}{'' if explained else ' (--debug shows where)'}")
        except KeyboardInterrupt as interrupt:
            sys.stderr.write(f"{self.NAME}: interrupted{self.after_interrupt()}\n")
            number = interrupt.args[0] if interrupt.args else signal.SIGINT
            sys.exit(128 + number)

    def _run(self) -> None:
        check_arguments(self.args)
        self.check()
        if self.args.quiet:
            logging.set_verbosity_error()
            logging.disable_progress_bar()
            os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"  # before `datasets` is imported
        self.work()

    @staticmethod
    def add_flags(parser: argparse.ArgumentParser) -> None:
        """Add the flags that only this command has."""

    def check(self) -> None:
        """Raise for arguments that cannot be right, before anything is read."""

    @abstractmethod
    def work(self) -> None:
        """Do what the command is for."""

    def after_interrupt(self) -> str:
        """Return the end of the line on Ctrl-C: how to resume."""
        return ""


def check_arguments(args: argparse.Namespace) -> None:
    """Raise for datasets, files and models that cannot be right. Read nothing."""
    for flag in ("dataset", "evaluate"):
        named = getattr(args, flag, None) or ()
        check_datasets([named] if isinstance(named, str) else named)
    for flag in ("config", "include_path"):
        path = getattr(args, flag, None)
        if path is not None and not os.path.exists(path):
            raise FileNotFoundError(f"--{flag.replace('_', '-')} {path} does not exist.")
    if getattr(args, "model", None) is not None:
        _check_model(args.model, getattr(args, "revision", None))


def _check_model(name: str, revision: str | None) -> None:
    """Raise for a directory without a model, a path that does not exist, or a Hub that cannot be reached."""
    if os.path.isdir(name):
        check_directory(name)
    elif find_gguf(name) is not None:
        return
    elif os.path.isfile(name):
        raise ValueError(f"{name} is a file: name the directory of a model, a Hub id or a {GGUF} file.")
    elif name.lower().endswith(GGUF):
        raise FileNotFoundError(f"The file {name} does not exist.")
    elif name.startswith((".", "~", os.sep)) or name.count("/") > 1:
        raise FileNotFoundError(f"The directory {name} does not exist.")
    elif not _is_cached(name, revision):
        check_connection()


def _is_cached(name: str, revision: str | None) -> bool:
    """Return True if a model is in the Hub's cache. Raise `ValueError` for a name that no model can have."""
    try:
        return try_to_load_from_cache(name, "config.json", revision=revision) is not None
    except HFValidationError as error:
        raise ValueError(f"{name!r} is neither a directory nor the id of a model on the Hub.") from error
