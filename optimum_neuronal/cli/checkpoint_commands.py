"""`optimum-cli neuronal inspect` and `convert`: what they do to checkpoints needs no model. Imports nothing heavy."""

import argparse
import json
import os
import sys

from optimum.commands.base import CommandInfo

from ..validation import check_embedding_bits
from .command import Command, write
from .flags import add_overwrite_flag


def _add_checkpoint_flags(parser: argparse.ArgumentParser) -> None:
    """Which checkpoint."""
    parser.add_argument("model", metavar="DIR_OR_ID", help="directory or Hub id of the checkpoint (required)")
    parser.add_argument("--revision", help="branch, tag or commit on the Hub (default: main)")


class InspectCommand(Command):
    COMMAND = CommandInfo(
        name="inspect", help="Tell how a checkpoint was pruned, and verify that its zeros are there."
    )
    USAGE = "DIR_OR_ID [flags]"
    EXAMPLES = ("qwen-sparse", "me/qwen-sparse --revision main --json")

    @staticmethod
    def parse_args(parser: argparse.ArgumentParser) -> None:
        _add_checkpoint_flags(parser)
        parser.add_argument("--json", action="store_true", help="print JSON instead of tables (default: no)")

    def work(self) -> None:
        from ..checkpoint.inspecting import inspect_checkpoint

        found = inspect_checkpoint(self.args.model, self.args.revision)
        write(json.dumps(found.to_dict(), indent=2) if self.args.json else str(found))
        if found.problems:
            sys.exit(1)


class ConvertCommand(Command):
    COMMAND = CommandInfo(
        name="convert",
        help="Write a pruned checkpoint packed or dense, the same weights to the bit, or rounded to few.",
    )
    USAGE = "DIR_OR_ID --format {packed,dense} [flags]"
    EXAMPLES = (
        "qwen-sparse --format packed",
        "qwen-sparse --format packed --value-bits 4 --output qwen-sparse-4",
        "me/qwen-sparse --format dense --output qwen-sparse-dense",
    )

    @staticmethod
    def parse_args(parser: argparse.ArgumentParser) -> None:
        _add_checkpoint_flags(parser)
        parser.add_argument(
            "--format",
            required=True,
            choices=("packed", "dense"),
            help="packed, the non-zero values and where they belong; or dense, which needs no optimum_neuronal to load "
            "(required)",
        )
        parser.add_argument(
            "--value-bits",
            type=int,
            help="with --format packed: round the kept values to so many bits, 8, 4, 3 or 2 (default: values stay as they are)",
        )
        parser.add_argument(
            "--embedding-bits",
            type=int,
            help="with --format packed: round token embeddings and head to so many bits, 8 (default: they stay as they are)",
        )
        parser.add_argument(
            "--output", help="directory to write, required with a Hub id (default: it takes DIR's place)"
        )
        add_overwrite_flag(parser)
        parser.add_argument(
            "--max-shard-size", default="2GB", help="largest file of weights, which is held in memory (default: 2GB)"
        )

    def work(self) -> None:
        from ..checkpoint.converting import check_value_bits, convert_checkpoint, find_source
        from ..checkpoint.opening import stored_size
        from ..checkpoint.own_files import check_output
        from ..files.directories import is_same

        check_value_bits(self.args.value_bits, self.args.format)
        check_embedding_bits(self.args.embedding_bits, self.args.format)
        source = find_source(self.args.model, self.args.output, self.args.revision)
        if self.args.output is not None and not is_same(self.args.output, source):
            check_output(self.args.output, self.args.overwrite, own=os.listdir(source))
        before = stored_size(source)
        bits = {"value_bits": self.args.value_bits, "embedding_bits": self.args.embedding_bits}
        written = convert_checkpoint(source, self.args.format, self.args.output, self.args.max_shard_size, **bits)
        after = stored_size(written)
        write(f"Written to {written}, {self.args.format}: {before / 1e6:.1f} MB became {after / 1e6:.1f} MB.")

    def after_interrupt(self) -> str:
        return ": nothing was changed"
