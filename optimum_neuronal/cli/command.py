"""What all commands of `optimum-cli neuronal` share.

`optimum-cli` builds the parsers of all plug-ins at every start, so no module here imports anything heavy: what a command
needs is imported when it runs.
"""

import sys
from collections.abc import Callable

from optimum.commands.base import BaseOptimumCLICommand


def write(text: str) -> None:
    """Writes a line to the terminal."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


class Command(BaseOptimumCLICommand):
    """A command whose expected errors are told in one line."""

    def run(self) -> None:
        from transformers.utils import logging

        try:
            self.work()
        except (ValueError, TypeError, OSError, RuntimeError, MemoryError, ImportError) as error:
            logging.get_logger(__name__).debug("The error's origin:", exc_info=True)
            message = " ".join(str(error).split())
            sys.exit(f"{self.COMMAND.name}: error: {message} (TRANSFORMERS_VERBOSITY=debug shows where)")
        except KeyboardInterrupt:
            sys.exit(f"{self.COMMAND.name}: interrupted{self.after_interrupt()}")

    work: Callable[[], None]

    def after_interrupt(self) -> str:
        """What to tell who pressed Ctrl-C."""
        return ""
