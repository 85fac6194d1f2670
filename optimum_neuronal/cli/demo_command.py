"""`optimum-cli neuronal demo`: what is gained, shown on a small model. Imports nothing heavy, see `command`."""

import argparse

from optimum.commands.base import CommandInfo

from .command import Command, write
from .flags import add_overwrite_flag


class DemoCommand(Command):
    COMMAND = CommandInfo(
        name="demo", help="Prune the small model that comes with the package, in many ways; six minutes on two cores."
    )
    EXAMPLES = ("", "--output somewhere-else")

    @staticmethod
    def parse_args(parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--output", default="demo-model", help="directory to save the 70%% sparse model in (default: demo-model)"
        )
        add_overwrite_flag(parser)

    def work(self) -> None:
        from ..checkpoint.own_files import check_output
        from ..demo.run import run_demo

        check_output(self.args.output, self.args.overwrite)
        run_demo(self.args.output, write)
