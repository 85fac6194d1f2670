"""`optimum-cli neuronal`: the parser of all commands, and `demo`."""

from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from .. import __version__
from ..demo.run import run_demo
from .checkpoint_commands import ConvertCommand, InspectCommand
from .command import Command, write
from .compare_command import CompareCommand
from .finetune_command import FinetuneCommand
from .flags import add_overwrite_flag, add_switch, describe
from .measuring_commands import AnswersCommand, EnvCommand, EvaluateCommand, SpeedCommand
from .prune_command import PruneCommand
from .sample_command import SampleCommand


class DemoCommand(Command):
    NAME = "demo"
    HELP = "Prune the small model of this package in several ways (two minutes)."
    EXAMPLES = ("", "--output somewhere-else")

    @staticmethod
    def add_flags(parser: ArgumentParser) -> None:
        output = "directory to save the 70%% sparse model in (default: demo-model)"
        parser.add_argument("--output", default="demo-model", help=output)
        add_overwrite_flag(parser)

    def work(self) -> None:
        run_demo(self.args.output, write, self.args.overwrite)


COMMANDS: tuple[type[Command], ...] = (
    PruneCommand, SampleCommand, FinetuneCommand, AnswersCommand, EvaluateCommand, CompareCommand, InspectCommand, ConvertCommand, SpeedCommand, EnvCommand, DemoCommand,
)  # fmt: skip
HELP = "NeuronAL: prune language models without retraining."
EXAMPLES = ("demo", "prune --preset paper --model Qwen/Qwen3-0.6B --sparsity 0.6 --output qwen3-60", "prune --help")


def make_parsers() -> dict[str, ArgumentParser]:
    """Return the parser of each command by its name, and the one of all as "neuronal"."""
    parser = ArgumentParser("optimum-cli neuronal")
    describe(parser, None, HELP, EXAMPLES)
    parser.add_argument("--version", action="version", version=f"optimum-neuronal {__version__}")
    subparsers = parser.add_subparsers()
    for command in COMMANDS:
        subparser = subparsers.add_parser(command.NAME, help=command.HELP)
        command.add_flags(subparser)
        add_switch(subparser, "--quiet", "hide notes and progress bars, except lm-eval's")
        add_switch(subparser, "--debug", "show where an error comes from")
        describe(subparser, command.USAGE, command.HELP, command.EXAMPLES)
        subparser.set_defaults(command=command, parser=subparser)
    return {"neuronal": parser, **subparsers.choices}


def main(words: Sequence[str]) -> None:
    """Run the command that the words after `optimum-cli neuronal` name. Without one, show the help."""
    parser = make_parsers()["neuronal"]
    args = parser.parse_args(words)
    if "command" in args:
        args.command(args).run()
    else:
        parser.print_help()


if __name__ == "__main__":  # `make style` renders the pages that `--help` shows without importing anything heavy
    for name, rendered in make_parsers().items():
        Path(__file__).with_name("help").joinpath(f"{name}.txt").write_text(rendered.format_help(), encoding="utf-8")
