"""`optimum-cli neuronal env`: what computes here, for whom asks why it is slow. Imports nothing heavy, see `command`."""

import argparse
import json

from optimum.commands.base import CommandInfo

from .command import Command, write


class EnvCommand(Command):
    COMMAND = CommandInfo(name="env", help="Tell versions, processor, accelerators and the kernels in use.")
    EXAMPLES = ("", "--json")

    @staticmethod
    def parse_args(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--json", action="store_true", help="print JSON instead of a table (default: no)")

    def work(self) -> None:
        from ..display import format_table
        from ..inference.environment import describe_environment

        found = describe_environment()
        rows = [[name, str(value)] for name, value in found.items()]
        write(json.dumps(found, indent=2) if self.args.json else "\n" + format_table(["", "here"], rows))
