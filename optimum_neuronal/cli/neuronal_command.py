"""`optimum-cli neuronal`: the group of all commands. Imports nothing heavy, see `command`."""

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo

from .checkpoint_commands import ConvertCommand, InspectCommand
from .demo_command import DemoCommand
from .env_command import EnvCommand
from .measuring_commands import CompareCommand, EvaluateCommand
from .prune_command import PruneCommand
from .speed_command import SpeedCommand


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
