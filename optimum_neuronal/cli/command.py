"""The base of all commands of `optimum-cli neuronal`."""

import argparse
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from ..checkpoint.hub import push_pruned
from ..common.display import escaped
from ..model.auto_classes import loading_code


# torch raises an `AssertionError` for a device that it was built without.
EXPECTED = (ValueError, TypeError, OSError, RuntimeError, MemoryError, ImportError, AssertionError)


def write(text: str) -> None:
    """Write lines to the terminal. Control characters, and what its encoding does not know, are escaped."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    lines = "\n".join(map(escaped, text.split("\n")))
    sys.stdout.write(lines.encode(encoding, "backslashreplace").decode(encoding) + "\n")
    sys.stdout.flush()


def write_saved(
    args: argparse.Namespace, model: PreTrainedModel, report: Any, tokenizer: Any, dtype: torch.dtype, hint: str = ""
) -> None:
    """Write where a model is saved, with a hint, and how to load it. Publish it if asked."""
    write(f"\nSaved to {args.output}{hint}. Load it with:")
    if args.format == "packed":
        write("    import optimum_neuronal  # to load the packed format")
    write(f"    {loading_code(model, args.output)}")
    if args.push_to_hub:
        how = {"format": args.format, "dtype": dtype, "private": args.private, "overwrite": args.overwrite}
        write(f"Published: {push_pruned(model, args.push_to_hub, report, tokenizer, **how)}")


def spelled(name: str) -> str:
    """Return the flag of an argument: `"max_windows"` -> `"--max-windows"`."""
    return "--" + name.replace("_", "-")


class Command(ABC):
    """A command whose expected errors are one line."""

    NAME: ClassVar[str]
    HELP: ClassVar[str]
    USAGE: ClassVar[str] = "[flags]"  # the arguments that it needs, in a line
    EXAMPLES: ClassVar[tuple[str, ...]] = ()
    NEEDS: ClassVar[Mapping[str, str]] = {}  # flag -> the flag without which it changes nothing

    def __init__(self, args: argparse.Namespace):
        self.args = args

    def run(self) -> None:
        """Do the work. End the process with one line on an expected error or on Ctrl-C."""
        try:
            self._check_given()
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
            folder = self.unfinished()
            is_there = folder is not None and os.path.exists(folder)
            hint = f": the same command resumes from here; to start over, delete {folder}" if is_there else ""
            sys.stderr.write(f"{self.NAME}: interrupted{hint}\n")
            sys.exit(130)

    @property
    def given(self) -> set[str]:
        """Names of the flags that differ from their defaults."""
        return {name for name, value in vars(self.args).items() if value != self.args.parser.get_default(name)}

    def _check_given(self) -> None:
        """Raise for flags that change nothing."""
        given = self.given
        idle = {flag: f"without {spelled(needed)}" for flag, needed in self.NEEDS.items() if needed not in given}
        if "device_map" in given:
            idle |= dict.fromkeys(("device", "stream"), "with --device-map")
        if "revision" in given and os.path.exists(self.args.model or ""):
            idle["revision"] = "for a model that is not on the Hub"
        for flag in sorted(given & idle.keys()):
            raise ValueError(f"{spelled(flag)} changes nothing {idle[flag]}: leave it out.")

    @staticmethod
    def add_flags(parser: argparse.ArgumentParser) -> None:
        """Add the flags that only this command has."""

    def check(self) -> None:
        """Raise for flags that do not go together."""

    @abstractmethod
    def work(self) -> None:
        """Do what the command is for."""

    def unfinished(self) -> str | Path | None:
        """Return the directory from which the same command resumes, if it has one."""
        return None
