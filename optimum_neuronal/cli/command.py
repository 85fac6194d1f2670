"""The base of all commands of `optimum-cli neuronal`."""

import sys
from typing import ClassVar

from optimum.commands.base import BaseOptimumCLICommand

from ..common.display import escaped
from ..transformers_plugin import register
from .early_checks import check_arguments
from .flags import add_switch, describe


EXPECTED = (ValueError, TypeError, OSError, RuntimeError, MemoryError, ImportError)


def write(text: str) -> None:
    """Write lines to the terminal. Control characters, and what its encoding does not know, are escaped."""
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
        """Do the work. End the process with one line on an expected error, or on Ctrl-C."""
        try:
            check_arguments(self.args)
            self.check()
            register()
            if self.args.quiet:
                _silence()
            self.work()
        except EXPECTED as error:
            if self.args.debug:
                raise
            message = escaped(" ".join(str(error).split())) or type(error).__name__
            explained = isinstance(error, (ValueError, TypeError, OSError))
            sys.exit(f"{self.COMMAND.name}: error: {message}{'' if explained else ' (--debug shows where)'}")
        except KeyboardInterrupt:
            sys.exit(f"{self.COMMAND.name}: interrupted{self.after_interrupt()}")

    def check(self) -> None:
        """Raise for arguments that cannot be right, before anything heavy is imported."""

    def work(self) -> None:
        """Do what the command is for."""
        raise NotImplementedError

    def after_interrupt(self) -> str:
        """Return the end of the line on Ctrl-C: how to go on."""
        return ""


def _silence() -> None:
    """Show no progress bars, and errors only."""
    from huggingface_hub.utils import disable_progress_bars
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    disable_progress_bars()
