"""`optimum-cli neuronal inspect`, which shows how a checkpoint was pruned without loading a model."""

import argparse
import json
import sys

from optimum.commands.base import CommandInfo

from .command import Command, write
from .flags import add_json_flag


def add_checkpoint_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say which checkpoint."""
    parser.add_argument("model", metavar="DIR_OR_ID", help="directory or Hub id of the checkpoint (required)")
    parser.add_argument("--revision", help="branch, tag or commit on the Hub (default: main)")


class InspectCommand(Command):
    """Command that shows how a checkpoint was pruned. Its status is 1 if the zeros are not as recorded."""

    COMMAND = CommandInfo(name="inspect", help="Show how a checkpoint was pruned, and count its zeros.")
    USAGE = "DIR_OR_ID [flags]"
    EXAMPLES = ("qwen-sparse", "me/qwen-sparse --revision main --json")

    @staticmethod
    def parse_args(parser: argparse.ArgumentParser) -> None:
        add_checkpoint_flags(parser)
        add_json_flag(parser)

    def work(self) -> None:
        from ..checkpoint.inspecting import inspect_checkpoint

        found = inspect_checkpoint(self.args.model, self.args.revision)
        write(json.dumps(found.to_dict(), indent=2) if self.args.json else str(found))
        if found.problems:
            sys.exit(1)
