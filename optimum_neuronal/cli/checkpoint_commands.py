"""`optimum-cli neuronal inspect` and `convert`, which read a pruned checkpoint."""

import argparse
import sys

import torch

from ..checkpoint.converting import convert_checkpoint
from ..checkpoint.hub import find_checkpoint
from ..checkpoint.inspecting import inspect_checkpoint
from ..checkpoint.packed_files import stored_size
from ..common.display import format_bytes
from .command import Command, write
from .flags import DTYPES, add_overwrite_flag, add_switch


def _add_checkpoint_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="DIR_OR_ID", help="directory or Hub id of the checkpoint (required)")
    parser.add_argument("--revision", help="branch, tag or commit on the Hub (default: main)")


class InspectCommand(Command):
    NAME = "inspect"
    HELP = "Show how a checkpoint was pruned, and count its zeros."
    USAGE = "DIR_OR_ID [flags]"
    EXAMPLES = ("qwen-sparse", "me/qwen-sparse --revision main")

    @staticmethod
    def add_flags(parser: argparse.ArgumentParser) -> None:
        _add_checkpoint_flags(parser)

    def work(self) -> None:
        inspection = inspect_checkpoint(self.args.model, self.args.revision)
        write(str(inspection))
        if inspection.problems:
            sys.exit(1)


class ConvertCommand(Command):
    NAME = "convert"
    HELP = "Convert a pruned checkpoint to packed or dense, with the same weights."
    USAGE = "DIR_OR_ID --format {packed,dense} --output DIR [flags]"
    EXAMPLES = (
        "qwen-sparse --format packed --output qwen-packed",
        "me/qwen-sparse --format dense --output qwen-sparse-dense",
        "qwen-sparse --format packed --dtype bfloat16 --output qwen-sparse-small",
    )

    @staticmethod
    def add_flags(parser: argparse.ArgumentParser) -> None:
        _add_checkpoint_flags(parser)
        format = "packed: small, loads with optimum_neuronal; dense: loads anywhere (required)"
        parser.add_argument("--format", required=True, choices=("packed", "dense"), help=format)
        parser.add_argument("--output", required=True, help="directory to write (required)")
        add_overwrite_flag(parser)
        dtype = "dtype of the written weights, which are rounded (default: unchanged)"
        parser.add_argument("--dtype", choices=DTYPES, help=dtype)
        add_switch(parser, "--trust-remote-code", "run code that comes with the model")

    def work(self) -> None:
        args = self.args
        how = {"revision": args.revision, "overwrite": args.overwrite, "trust_remote_code": args.trust_remote_code}
        how["dtype"] = args.dtype and getattr(torch, args.dtype)
        written = convert_checkpoint(args.model, args.format, args.output, **how)
        source = find_checkpoint(args.model, args.revision)
        before, after = (format_bytes(stored_size(folder)) for folder in (source, written))
        write(f"Written to {written}, {args.format}: {before} became {after}.")
