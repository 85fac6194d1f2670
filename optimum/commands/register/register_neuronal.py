"""Adds `neuronal` to `optimum-cli`, which imports every module of this folder at every start.

No folder under `optimum/` may hold an `__init__.py`: it would hide optimum's own modules.
"""

import argparse

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo


class NeuronalCommand(BaseOptimumCLICommand):
    COMMAND = CommandInfo(name="neuronal", help="NeuronAL: prune language models without retraining.")

    @staticmethod
    def parse_args(parser: argparse.ArgumentParser) -> None:
        parser.prefix_chars = "\0"  # no word is a flag here, not even --help: all go to the package's own parser
        parser.add_argument("words", nargs=argparse.REMAINDER)

    def run(self) -> None:
        from optimum_neuronal.cli.neuronal_command import main

        main(self.args.words)


REGISTER_COMMANDS = [NeuronalCommand]
