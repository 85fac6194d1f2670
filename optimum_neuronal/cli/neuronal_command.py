"""`optimum-cli neuronal`, the group of all commands."""

from argparse import ArgumentParser

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo

from .compare_command import CompareCommand
from .convert_command import ConvertCommand
from .demo_command import DemoCommand
from .env_command import EnvCommand
from .evaluate_command import EvaluateCommand
from .flags import describe
from .inspect_command import InspectCommand
from .prune_command import PruneCommand
from .speed_command import SpeedCommand


COMMANDS = (
    PruneCommand, EvaluateCommand, CompareCommand, InspectCommand, ConvertCommand, SpeedCommand, EnvCommand, DemoCommand,
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
        from .. import __version__

        describe(parser, None, "Sparse language models without retraining.", EXAMPLES)
        parser.add_argument("--version", action="version", version=f"optimum-neuronal {__version__}")
