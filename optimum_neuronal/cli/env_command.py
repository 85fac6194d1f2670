"""`optimum-cli neuronal env`, which shows what computes here."""

import argparse
import json

from optimum.commands.base import CommandInfo

from .command import Command, write
from .flags import add_json_flag


class EnvCommand(Command):
    """Command that shows what computes here."""

    COMMAND = CommandInfo(name="env", help="Show versions, processor, accelerators and the kernels in use.")
    EXAMPLES = ("", "--json")

    @staticmethod
    def parse_args(parser: argparse.ArgumentParser) -> None:
        add_json_flag(parser)

    def work(self) -> None:
        from ..common.display import format_table
        from ..native.environment import describe_environment

        found = describe_environment()
        rows = [[name, str(value)] for name, value in found.items()]
        write(json.dumps(found, indent=2) if self.args.json else "\n" + format_table(["", "here"], rows))
