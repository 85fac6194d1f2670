"""What all commands of `optimum-cli neuronal` share.

`optimum-cli` builds the parsers of all plug-ins at every start, so no module here imports anything heavy: what a command
needs is imported when it runs.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ClassVar

from optimum.commands.base import BaseOptimumCLICommand

from ..display import escaped
from .parser import add_verbosity_flags, describe


EXPECTED = (ValueError, TypeError, OSError, RuntimeError, MemoryError, ImportError)


def write(text: str) -> None:
    """Writes lines to the terminal. What would steer it, or what its encoding does not know, is escaped."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    lines = "\n".join(map(escaped, text.split("\n")))
    sys.stdout.write(lines.encode(encoding, "backslashreplace").decode(encoding) + "\n")
    sys.stdout.flush()


class Command(BaseOptimumCLICommand):
    """A command whose expected errors are told in one line.

    Attributes:
        USAGE (`str`): the arguments that it needs, in a line.
        DESCRIPTION (`str`): what it does, for its own help; without it, what the list of commands says.
        EXAMPLES (`tuple[str, ...]`): arguments, as they are typed.
    """

    USAGE: ClassVar[str] = "[flags]"
    DESCRIPTION: ClassVar[str] = ""
    EXAMPLES: ClassVar[tuple[str, ...]] = ()

    def __init__(self, subparsers, args=None, command=None, from_defaults_factory=False, parser=None):
        super().__init__(subparsers, args, command, from_defaults_factory, parser)
        if not from_defaults_factory:
            add_verbosity_flags(self.parser)
            describe(self.parser, self.USAGE, self.DESCRIPTION or self.COMMAND.help, self.EXAMPLES)

    def run(self) -> None:
        args = self.args or argparse.Namespace(debug=False, quiet=False)
        try:
            with _quiet(args.quiet):
                self.work()
        except EXPECTED as error:
            if args.debug:
                raise
            message = escaped(" ".join(str(error).split())) or type(error).__name__
            sys.exit(f"{self.COMMAND.name}: error: {message}{_where_to_look(error)}")
        except KeyboardInterrupt:
            sys.exit(f"{self.COMMAND.name}: interrupted{self.after_interrupt()}")

    work: Callable[[], None]

    def after_interrupt(self) -> str:
        """What to tell who pressed Ctrl-C."""
        return ""


def _where_to_look(error: Exception) -> str:
    """Bad input explains itself; of what failed on the way one may want to know where."""
    return "" if isinstance(error, (ValueError, TypeError, OSError)) else " (--debug shows where)"


@contextmanager
def _quiet(wanted: bool) -> Iterator[None]:
    """While the context lasts, transformers and this package show no progress bars, and of notes errors only."""
    if not wanted:
        yield
        return
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
    from transformers.utils import logging

    verbosity, bars, hub_bars = (
        logging.get_verbosity(),
        logging.is_progress_bar_enabled(),
        are_progress_bars_disabled(),
    )
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    disable_progress_bars()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
        if not hub_bars:
            enable_progress_bars()
