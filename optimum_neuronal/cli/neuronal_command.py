"""`optimum-cli neuronal`, the group of all commands, and `demo`."""

from argparse import ArgumentParser

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo

from .checkpoint_commands import ConvertCommand, InspectCommand
from .command import Command, write
from .compare_command import CompareCommand
from .flags import add_overwrite_flag, describe
from .measuring_commands import EnvCommand, EvaluateCommand, SpeedCommand
from .prune_command import PruneCommand


class DemoCommand(Command):
    COMMAND = CommandInfo(name="demo", help="Prune the small model of this package in several ways (two minutes).")
    EXAMPLES = ("", "--output somewhere-else")

    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        output = "directory to save the 70%% sparse model in (default: demo-model)"
        parser.add_argument("--output", default="demo-model", help=output)
        add_overwrite_flag(parser)

    def work(self) -> None:
        from ..checkpoint.saving import check_output
        from ..demo.run import run_demo

        check_output(self.args.output, self.args.overwrite)
        run_demo(self.args.output, write)


COMMANDS = (
    PruneCommand, EvaluateCommand, CompareCommand, InspectCommand, ConvertCommand, SpeedCommand, EnvCommand, DemoCommand,
)  # fmt: skip
EXAMPLES = ("demo", "prune --preset paper --model Qwen/Qwen3-0.6B --sparsity 0.6 --output qwen3-60", "prune --help")


class NeuronalCommand(BaseOptimumCLICommand):
    COMMAND = CommandInfo(name="neuronal", help="NeuronAL: prune language models without retraining.")
    SUBCOMMANDS = tuple(
        CommandInfo(name=command.COMMAND.name, help=command.COMMAND.help, subcommand_class=command)
        for command in COMMANDS
    )

    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        from .. import __version__

        describe(parser, None, "NeuronAL: prune language models without retraining.", EXAMPLES)
        parser.add_argument("--version", action="version", version=f"optimum-neuronal {__version__}")
