"""The base of all commands of `optimum-cli neuronal`, and their parser: help with examples, errors in one line.

`optimum-cli` builds the parsers of all plug-ins at every start, so no module here imports anything heavy: what a command
needs is imported when it runs.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

from optimum.commands.base import BaseOptimumCLICommand

from ..common.display import escaped
from ..common.validation import did_you_mean
from ..transformers_plugin import register
from .early_checks import check_arguments
from .flags import add_switch


EXPECTED = (ValueError, TypeError, OSError, RuntimeError, MemoryError, ImportError)


def write(text: str) -> None:
    """Write lines to the terminal. What would steer it, or what its encoding does not know, is escaped."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    lines = "\n".join(map(escaped, text.split("\n")))
    sys.stdout.write(lines.encode(encoding, "backslashreplace").decode(encoding) + "\n")
    sys.stdout.flush()


class Command(BaseOptimumCLICommand):
    """A command whose expected errors are one line.

    Attributes:
        USAGE (`str`): the arguments that it needs, in a line.
        EXAMPLES (`tuple[str, ...]`): arguments, as they are typed.
    """

    USAGE: ClassVar[str] = "[flags]"
    EXAMPLES: ClassVar[tuple[str, ...]] = ()

    def __init__(self, subparsers, args=None, command=None, from_defaults_factory=False, parser=None):
        super().__init__(subparsers, args, command, from_defaults_factory, parser)
        if not from_defaults_factory:
            add_switch(self.parser, "--quiet", "show no progress bars and no notes")
            add_switch(self.parser, "--debug", "show where an error comes from")
            describe(self.parser, self.USAGE, self.COMMAND.help, self.EXAMPLES)

    def run(self) -> None:
        """Do the work. End the process with a line on an expected error, or on Ctrl-C."""
        try:
            self.check()
            register()
            with _quiet(self.args.quiet):
                self.work()
        except EXPECTED as error:
            if self.args.debug:
                raise
            message = escaped(" ".join(str(error).split())) or type(error).__name__
            explained = isinstance(error, (ValueError, TypeError, OSError))  # bad input explains itself
            sys.exit(f"{self.COMMAND.name}: error: {message}{'' if explained else ' (--debug shows where)'}")
        except KeyboardInterrupt:
            sys.exit(f"{self.COMMAND.name}: interrupted{self.after_interrupt()}")

    def check(self) -> None:
        """Raise for arguments that cannot be right, before anything heavy is imported."""
        check_arguments(self.args)

    work: Callable[[], None]

    def after_interrupt(self) -> str:
        """Return the end of the line on Ctrl-C: what becomes of the work."""
        return ""


class CommandParser(argparse.ArgumentParser):
    """A parser that shows its own usage for an unknown flag; `argparse` leaves that to the parser of all commands."""

    def parse_known_args(self, args=None, namespace=None):
        """Parse as `argparse` does, but raise for unknown arguments, with the closest flag.

        Unknown flags come first: a required one that is misspelled would only be said to be missing.
        """
        words = sys.argv[1:] if args is None else list(args)
        flags = [word for word in words if word.startswith("--") and " " not in word]
        for flag in flags[: flags.index("--") if "--" in flags else None]:
            name = flag.partition("=")[0]
            if not any(option.startswith(name) for option in self._option_string_actions):  # it may be shortened
                self._refuse(flag)
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self._refuse(next((word for word in unknown if word.startswith("-")), unknown[0]))
        return namespace, unknown

    def _refuse(self, word: str) -> None:
        known = [option for option in self._option_string_actions if option.startswith("--")]
        self.error(f"unrecognized argument: {word}.{did_you_mean(word.partition('=')[0], known)}")


def describe(parser: argparse.ArgumentParser, usage: str, description: str, examples: Sequence[str]) -> None:
    """Give the help of a command a usage of one line, a description, and examples, which follow the command's name."""
    parser.usage = f"{parser.prog} {usage}"
    parser.description = description
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "\n".join(["examples:", *(f"  {parser.prog} {example}".rstrip() for example in examples)])


@contextmanager
def _quiet(wanted: bool) -> Iterator[None]:
    """Show no progress bars of transformers, the Hub and this package, and errors alone of notes, if that is wanted."""
    if not wanted:
        yield
        return
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
    from transformers.utils import logging

    verbosity, had_bars, had_hub_bars = (
        logging.get_verbosity(),
        logging.is_progress_bar_enabled(),
        not are_progress_bars_disabled(),
    )
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    disable_progress_bars()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bars:
            logging.enable_progress_bar()
        if had_hub_bars:
            enable_progress_bars()
