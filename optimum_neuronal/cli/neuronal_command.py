"""`optimum-cli neuronal`: the group of all commands. Imports nothing heavy, see `command`."""

from argparse import ArgumentParser

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo

from ..version import __version__
from .checkpoint_commands import ConvertCommand, InspectCommand
from .demo_command import DemoCommand
from .env_command import EnvCommand
from .measuring_commands import CompareCommand, EvaluateCommand
from .parser import CommandParser, describe
from .prune_command import PruneCommand
from .speed_command import SpeedCommand


EXAMPLES = ("demo", "prune --model Qwen/Qwen3-0.6B --sparsity 0.7 --output qwen-sparse", "prune --help")


class NeuronalCommand(BaseOptimumCLICommand):
    COMMAND = CommandInfo(name="neuronal", help="Sparse language models without retraining (NeuronAL).")
    SUBCOMMANDS = tuple(
        CommandInfo(name=command.COMMAND.name, help=command.COMMAND.help, subcommand_class=command)
        for command in (
            PruneCommand,
            EvaluateCommand,
            CompareCommand,
            InspectCommand,
            ConvertCommand,
            SpeedCommand,
            EnvCommand,
            DemoCommand,
        )
    )

    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        describe(
            parser, "COMMAND [flags]", "Sparse language models without retraining, and what they bring.", EXAMPLES
        )
        parser.add_argument("--version", action="version", version=f"optimum-neuronal {__version__}")

    @property
    def subparsers(self):
        """Where the commands' parsers are made: a kind of their own, unlike other plug-ins'."""
        if getattr(self, "_subparsers", None) is None:
            self._subparsers = self.parser.add_subparsers(
                prog=self.parser.prog, parser_class=CommandParser, title="commands", metavar="COMMAND"
            )
        return self._subparsers

    @subparsers.setter
    def subparsers(self, subparsers) -> None:
        self._subparsers = subparsers
