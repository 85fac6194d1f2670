"""The base of all commands of `optimum-cli neuronal`."""

import argparse
import os
import sys
from abc import ABC, abstractmethod
from typing import ClassVar

from huggingface_hub import try_to_load_from_cache
from transformers.utils import logging

from ..common.connection import check_connection
from ..common.display import escaped
from ..data.documents import check_datasets
from ..files.atomic import finish_moves
from ..model.sources import GGUF, check_directory, find_gguf


EXPECTED = (ValueError, TypeError, OSError, RuntimeError, MemoryError, ImportError)


def write(text: str) -> None:
    """Write lines to the terminal. Control characters, and what its encoding does not know, are escaped."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    lines = "\n".join(map(escaped, text.split("\n")))
    sys.stdout.write(lines.encode(encoding, "backslashreplace").decode(encoding) + "\n")
    sys.stdout.flush()


class Command(ABC):
    """A command whose expected errors are one line."""

    NAME: ClassVar[str]
    HELP: ClassVar[str]
    USAGE: ClassVar[str] = "[flags]"  # the arguments that it needs, in a line
    EXAMPLES: ClassVar[tuple[str, ...]] = ()

    def __init__(self, args: argparse.Namespace):
        self.args = args

    def run(self) -> None:
        """Do the work. End the process with one line on an expected error, or on Ctrl-C."""
        try:
            check_arguments(self.args)
            self.check()
            if self.args.quiet:
                logging.set_verbosity_error()
                logging.disable_progress_bar()
                os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"  # before `datasets` is imported
            self.work()
        except EXPECTED as error:
            if self.args.debug:
                raise
            message = escaped(" ".join(str(error).split())) or type(error).__name__
            explained = isinstance(error, (ValueError, TypeError, OSError))
            sys.exit(f"{self.NAME}: error: {message}{'' if explained else ' (--debug shows where)'}")
        except KeyboardInterrupt:
            sys.exit(f"{self.NAME}: interrupted{self.after_interrupt()}")

    @staticmethod
    def add_flags(parser: argparse.ArgumentParser) -> None:
        """Add the flags that only this command has."""

    def check(self) -> None:
        """Raise for arguments that cannot be right, before anything is read."""

    @abstractmethod
    def work(self) -> None:
        """Do what the command is for."""

    def after_interrupt(self) -> str:
        """Return the end of the line on Ctrl-C: how to go on."""
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
        finish_moves(name)
        check_directory(name)
    elif find_gguf(name) is not None:
        return
    elif os.path.isfile(name):
        raise ValueError(f"{name} is a file: name the directory of a model, a Hub id or a {GGUF} file.")
    elif name.lower().endswith(GGUF):
        raise FileNotFoundError(f"The file {name} does not exist.")
    elif name.startswith((".", "~", os.sep)) or name.count("/") > 1:
        raise FileNotFoundError(f"The directory {name} does not exist.")
    elif try_to_load_from_cache(name, "config.json", revision=revision) is None:
        check_connection()
