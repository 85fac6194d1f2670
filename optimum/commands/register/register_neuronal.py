"""Adds `neuronal` to `optimum-cli`, which imports every module of this folder at every start.

No folder under `optimum/` may hold an `__init__.py`: it would hide optimum's own modules.
"""

import argparse
import sys
from pathlib import Path

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo


PAGES = Path(__file__).parents[3] / "optimum_neuronal" / "cli" / "help"  # as the package's parser renders them


class NeuronalCommand(BaseOptimumCLICommand):
    COMMAND = CommandInfo(name="neuronal", help="NeuronAL: prune language models without retraining.")

    @staticmethod
    def parse_args(parser: argparse.ArgumentParser) -> None:
        parser.prefix_chars = "\0"  # no word is a flag here, not even --help: all go to the package's own parser
        parser.add_argument("words", nargs=argparse.REMAINDER)

    def run(self) -> None:
        words = self.args.words
        name = next((word for word in words[:1] if not word.startswith("-")), "neuronal")
        if (not words or {"-h", "--help"} & {*words}) and (page := PAGES / f"{name}.txt").is_file():
            sys.stdout.write(page.read_text(encoding="utf-8"))
            return
        from optimum_neuronal.cli.neuronal_command import main

        main(words)


REGISTER_COMMANDS = [NeuronalCommand]
