"""`optimum-cli neuronal speed`: what packed weights bring on this machine. Imports nothing heavy, see `command`."""

import argparse
import json
from pathlib import Path

from optimum.commands.base import CommandInfo

from .command import Command, write
from .flags import add_model_flags, device_of, load_options
from .parser import count


class SpeedCommand(Command):
    COMMAND = CommandInfo(name="speed", help="Measure a sparse model with dense and with packed weights, in turns.")
    USAGE = "--model MODEL [flags]"
    EXAMPLES = (
        "--model qwen-sparse --dtype bfloat16",
        "--model qwen-sparse --value-bits 4",
        "--model qwen-sparse --batches 1 16 --plots speed",
    )

    @staticmethod
    def parse_args(parser: argparse.ArgumentParser) -> None:
        add_model_flags(parser)
        parser.add_argument(
            "--batches", nargs="+", type=count, default=[1, 4, 8], help="sequences at a time (default: 1 4 8)"
        )
        parser.add_argument("--prompt-tokens", type=count, default=512, help="tokens of the prefill (default: 512)")
        parser.add_argument("--new-tokens", type=count, default=32, help="tokens to generate (default: 32)")
        parser.add_argument("--rounds", type=count, default=5, help="how often each is timed, in turns (default: 5)")
        parser.add_argument(
            "--value-bits", type=int, choices=(8, 4, 3, 2), metavar="N",
            help="time packed weights with values of 8, 4, 3 or 2 bits too (default: no)",
        )  # fmt: skip
        parser.add_argument(
            "--activations", choices=("int8", "bf16"), default="int8",
            help="what inputs become that meet values of few bits (default: int8)",
        )  # fmt: skip
        parser.add_argument("--threads", type=count, help="of torch (default: as torch decides)")
        parser.add_argument("--json", action="store_true", help="print JSON instead of tables (default: no)")
        parser.add_argument(
            "--plots",
            metavar="FILE",
            help="draw a figure, FILE.png and FILE.svg; needs the extra [report] (default: no)",
        )

    def work(self) -> None:
        import torch

        from ..evaluation.figures.speed import plot_speed
        from ..evaluation.plots import check_matplotlib
        from ..evaluation.speed import measure_speed

        args = self.args
        if args.plots:
            check_matplotlib()
            if not Path(args.plots).absolute().parent.is_dir():
                raise ValueError(f"The folder of --plots {args.plots} does not exist: make it first.")
        if args.threads:
            torch.set_num_threads(args.threads)
        models, resident = self._load()
        numbers = (args.batches, args.prompt_tokens, args.new_tokens, args.rounds)
        report = measure_speed(models["dense"], models["packed"], *numbers, resident, models.get("coded"))
        write(json.dumps(report.to_dict(), indent=2) if args.json else f"\n{report}")
        if args.plots:
            plot_speed(report.to_dict(), args.plots)

    def _load(self):
        """The model in its forms, and what the process grew by with each."""
        from ..checkpoint.loading import load_checkpoint
        from ..evaluation.speed import prefill_seconds
        from ..runtime.peak_memory import resident_memory

        device = device_of(self.args)
        loads = {"dense": load_checkpoint, "packed": self._load_packed}
        loads |= {"coded": self._load_coded} if self.args.value_bits else {}
        models, resident, before = {}, {}, resident_memory()
        for name, load in loads.items():
            model = load(self.args.model, **load_options(self.args)).to(device)
            prefill_seconds(model, 8)  # what is mapped from disk is read when it is used
            models[name] = model
            now = resident_memory()
            if now is not None:
                resident[name] = now - before
                before = now
        return models, resident

    def _load_packed(self, model: str, **options):
        """The model with packed values as they are, also where the checkpoint holds codes that are to be timed beside."""
        from .. import SparseModelForCausalLM, sparsify
        from ..checkpoint.loading import load_checkpoint

        if self.args.value_bits:
            return sparsify(load_checkpoint(model, **options))
        return SparseModelForCausalLM.from_pretrained(model, **options)

    def _load_coded(self, model: str, **options):
        from .. import sparsify
        from ..checkpoint.loading import load_checkpoint

        return sparsify(load_checkpoint(model, **options), self.args.value_bits, self.args.activations)
