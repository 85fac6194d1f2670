"""`optimum-cli neuronal demo`, which prunes a small model in several ways."""

import argparse

from optimum.commands.base import CommandInfo

from .command import Command, write
from .flags import add_overwrite_flag, add_switch


class DemoCommand(Command):
    """Command that runs the demonstration."""

    COMMAND = CommandInfo(
        name="demo", help="Prune the small model that comes with the package in several ways (one or two minutes)."
    )
    EXAMPLES = ("", "--all --output somewhere-else")

    @staticmethod
    def parse_args(parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--output", default="demo-model", help="directory to save the 70%% sparse model in (default: demo-model)"
        )
        add_overwrite_flag(parser)
        add_switch(parser, "--all", "compare at 60, 70 and 80 %%, with the preset best too: six to eight minutes")

    def work(self) -> None:
        from ..checkpoint.own_files import check_output
        from ..demo.run import run_demo

        check_output(self.args.output, self.args.overwrite)
        run_demo(self.args.output, write, self.args.all)
