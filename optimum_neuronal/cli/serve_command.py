"""`optimum-cli neuronal serve`, `chat` and `register`: sparse models in transformers' and other programs."""

import argparse
from importlib.util import find_spec

from optimum.commands.base import CommandInfo

from .command import Command, write
from .early_checks import check_model


NEEDED = ("accelerate", "fastapi", "openai", "pydantic", "rich", "uvicorn")  # what transformers[serving] brings


def check_serving() -> None:
    """Raise `ImportError` if packages of the extra `serve` are missing."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise ImportError(
            f"transformers' server needs {', '.join(missing)}: pip install 'optimum-neuronal[serve]' (the extra serve)."
        )


class ServeCommand(Command):
    """Command that runs `transformers serve` for a model with packed weights."""

    COMMAND = CommandInfo(name="serve", help="Serve a model by transformers' server, which speaks OpenAI's API.")
    USAGE = "DIR [flags of `transformers serve`]"
    EXAMPLES = ("qwen-packed", "qwen-packed --port 8001 --continuous-batching --cb-num-blocks 256")

    @staticmethod
    def parse_args(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("model", metavar="DIR", help="directory or Hub id of the model, packed or dense")
        parser.add_argument("flags", nargs=argparse.REMAINDER, help="passed on to transformers' command")

    def check(self) -> None:
        check_serving()
        name, _, revision = self.args.model.partition("@")
        check_model(name, revision or None)

    def work(self) -> None:
        from ..transformers_plugin.serving import serve

        serve(self.args.model, *self.args.flags)


class ChatCommand(ServeCommand):
    """Command that runs `transformers chat` with a model of packed weights."""

    COMMAND = CommandInfo(name="chat", help="Chat with a model in the terminal, by transformers' chat.")
    USAGE = "DIR [flags of `transformers chat`]"
    EXAMPLES = ("qwen-packed", "qwen-packed max_new_tokens=100 do_sample=False", "qwen-packed http://localhost:8000")

    def work(self) -> None:
        from ..transformers_plugin.serving import chat

        chat(self.args.model, *self.args.flags)


class RegisterCommand(Command):
    """Command that lets every process of this environment load packed checkpoints."""

    COMMAND = CommandInfo(
        name="register", help="Let all programs of this Python environment load packed checkpoints, or no longer."
    )
    USAGE = "--on | --off | --status"
    EXAMPLES = ("--on", "--off", "--status")

    @staticmethod
    def parse_args(parser: argparse.ArgumentParser) -> None:
        choice = parser.add_mutually_exclusive_group(required=True)
        choice.add_argument("--on", action="store_true", help="write a start-up file (.pth) into this environment")
        choice.add_argument("--off", action="store_true", help="remove it")
        choice.add_argument("--status", action="store_true", help="show where it is")

    def work(self) -> None:
        from ..transformers_plugin import autoload

        if self.args.on:
            autoload.switch_on()
        elif self.args.off:
            autoload.switch_off()
        found = autoload.find_files()
        write("\n".join(f"on: {path}" for path in found) or "off: a program has to import optimum_neuronal itself")
