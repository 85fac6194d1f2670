"""`optimum-cli neuronal`, the group of all commands."""

from argparse import ArgumentParser

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo

from .. import __version__
from .checkpoint_commands import ConvertCommand, InspectCommand
from .command import CommandParser, describe
from .demo_command import DemoCommand
from .env_command import EnvCommand
from .evaluate_command import EvaluateCommand
from .measuring_commands import CompareCommand
from .prune_command import PruneCommand
from .speed_command import SpeedCommand


COMMANDS = (
    PruneCommand, EvaluateCommand, CompareCommand, InspectCommand, ConvertCommand, SpeedCommand,
    EnvCommand, DemoCommand,
)  # fmt: skip
EXAMPLES = ("demo", "prune --model Qwen/Qwen3-0.6B --sparsity 0.7 --output qwen-sparse", "prune --help")


class NeuronalCommand(BaseOptimumCLICommand):
    """Group of the commands."""

    COMMAND = CommandInfo(name="neuronal", help="Sparse language models without retraining (NeuronAL).")
    SUBCOMMANDS = tuple(
        CommandInfo(name=command.COMMAND.name, help=command.COMMAND.help, subcommand_class=command)
        for command in COMMANDS
    )

    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        about = "Sparse language models without retraining, and what they bring."
        describe(parser, "COMMAND [flags]", about, EXAMPLES)
        parser.add_argument("--version", action="version", version=f"optimum-neuronal {__version__}")

    @property
    def subparsers(self):
        """The commands' parsers, which are [`CommandParser`]s, unlike other plug-ins'."""
        if getattr(self, "_subparsers", None) is None:
            self._subparsers = self.parser.add_subparsers(
                prog=self.parser.prog, parser_class=CommandParser, title="commands", metavar="COMMAND"
            )
        return self._subparsers

    @subparsers.setter
    def subparsers(self, subparsers) -> None:
        self._subparsers = subparsers
