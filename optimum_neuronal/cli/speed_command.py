"""`optimum-cli neuronal speed`, which shows what packed weights gain on this machine."""

import argparse
import json

from optimum.commands.base import CommandInfo

from .command import Command, write
from .flags import add_json_flag, add_model_flags, device_of, load_options


class SpeedCommand(Command):
    """Command that times a sparse model with dense and with packed weights."""

    COMMAND = CommandInfo(name="speed", help="Measure a sparse model with dense and with packed weights, in turns.")
    USAGE = "--model MODEL [flags]"
    EXAMPLES = ("--model qwen-sparse --dtype bfloat16", "--model qwen-sparse --batches 1 16 --threads 4")

    @staticmethod
    def parse_args(parser: argparse.ArgumentParser) -> None:
        add_model_flags(parser)
        parser.add_argument(
            "--batches", nargs="+", type=int, default=[1, 4, 8], help="sequences at a time (default: 1 4 8)"
        )
        parser.add_argument("--prompt-tokens", type=int, default=512, help="tokens of the prefill (default: 512)")
        parser.add_argument("--new-tokens", type=int, default=32, help="tokens to generate (default: 32)")
        parser.add_argument("--rounds", type=int, default=5, help="timings of each form (default: 5)")
        parser.add_argument("--threads", type=int, help="threads of torch (default: as torch decides)")
        add_json_flag(parser)

    def work(self) -> None:
        import torch

        from ..evaluation.speed import measure_speed
        from ..model.load_model import load_model
        from ..packed.packed_module import packed_modules
        from ..packed.sparsify import densify, sparsify

        args, device = self.args, device_of(self.args)
        if args.threads:
            torch.set_num_threads(args.threads)
        dense = densify(load_model(args.model, **load_options(args))).to(device)
        packed = load_model(args.model, **load_options(args))
        if next(packed_modules(packed), None) is None:
            packed = sparsify(packed)
        numbers = (args.batches, args.prompt_tokens, args.new_tokens, args.rounds)
        report = measure_speed(dense, packed.to(device), *numbers)
        write(json.dumps(report.to_dict(), indent=2) if args.json else f"\n{report}")
