"""`optimum-cli neuronal convert`, which writes a pruned checkpoint in another format."""

import argparse

from optimum.commands.base import CommandInfo

from .command import Command, write
from .flags import add_config_flags, add_overwrite_flag, given_fields
from .inspect_command import add_checkpoint_flags


class ConvertCommand(Command):
    """Command that writes a pruned checkpoint in another format."""

    COMMAND = CommandInfo(
        name="convert", help="Write a pruned checkpoint packed or dense, with the same weights to the bit."
    )
    USAGE = "DIR_OR_ID --format {packed,dense} [flags]"
    EXAMPLES = (
        "qwen-sparse --format packed",
        "qwen-sparse --format packed --embedding-bits 8 --output qwen-sparse-8",
        "me/qwen-sparse --format dense --output qwen-sparse-dense",
    )

    @staticmethod
    def parse_args(parser: argparse.ArgumentParser) -> None:
        add_checkpoint_flags(parser)
        parser.add_argument(
            "--format",
            required=True,
            choices=("packed", "dense"),
            help="packed: small, loads with optimum_neuronal; dense: loads anywhere (required)",
        )
        parser.add_argument("--output", help="directory to write, required with a Hub id (default: replace DIR)")
        add_overwrite_flag(parser)
        parser.add_argument("--max-shard-size", default="2GB", help="largest file of weights (default: 2GB)")
        add_config_flags(parser, ("embedding_bits",))

    def work(self) -> None:
        from ..checkpoint.converting import convert_checkpoint, find_source
        from ..checkpoint.own_files import check_output
        from ..checkpoint.packed_files import stored_size
        from ..files.directories import is_same

        args = self.args
        source = find_source(args.model, args.output, args.revision)
        if args.output is not None and not is_same(args.output, source):
            check_output(args.output, args.overwrite)
        before = stored_size(source)
        written = convert_checkpoint(source, args.format, args.output, args.max_shard_size, **given_fields(args))
        after = stored_size(written)
        write(f"Written to {written}, {args.format}: {before / 1e6:.1f} MB became {after / 1e6:.1f} MB.")

    def after_interrupt(self) -> str:
        return ": nothing was changed"
