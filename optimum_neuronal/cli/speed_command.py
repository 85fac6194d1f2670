"""`optimum-cli neuronal speed`: what packed weights bring on this machine. Imports nothing heavy, see `command`."""

import argparse
import json
from functools import partial
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
        "--model qwen-sparse --value-bits 4 --embedding-bits 8",
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
            "--embedding-bits", type=int, choices=(8,), metavar="N",
            help="time them with token embeddings and head of 8 bits, too (default: no)",
        )  # fmt: skip
        parser.add_argument(
            "--activations", choices=("int8", "bf16"), default="int8",
            help="what inputs become that meet values of few bits (default: int8)",
        )  # fmt: skip
        parser.add_argument(
            "--no-torchao", action="store_true",
            help="leave out int8 and int4 weight-only by torchao, which are timed where it is installed (default: no)",
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

        from ..evaluation.quantized import EAGER, FORMS
        from ..evaluation.speed import measure_speed
        from ..evaluation.speed_figure import plot_speed
        from ..figure_style import check_matplotlib

        args = self.args
        if args.plots:
            check_matplotlib()
            if not Path(args.plots).absolute().parent.is_dir():
                raise ValueError(f"The folder of --plots {args.plots} does not exist: make it first.")
            if args.plots.endswith((".png", ".svg")):
                raise ValueError(f"--plots {args.plots}: leave the suffix out, since .png and .svg are added.")
        if args.threads:
            torch.set_num_threads(args.threads)
        models, resident, left_out = self._load()
        numbers = (args.batches, args.prompt_tokens, args.new_tokens, args.rounds)
        report = measure_speed(models.pop("dense"), models.pop("packed"), *numbers, resident, models, left_out)
        write(json.dumps(report.to_dict(), indent=2) if args.json else f"\n{report}")
        if FORMS.keys() & models.keys() and not args.json:
            write(EAGER)
        if args.plots:
            for suffix, content in plot_speed(report).items():
                Path(args.plots + suffix).write_bytes(content)

    @property
    def few_bits(self) -> list[str]:
        """What has few bits in the form that is timed beside; none if there is no such form."""
        values, head = self.args.value_bits, self.args.embedding_bits
        return [f"{values} bits"] * bool(values) + [f"{head}-bit head"] * bool(head)

    def _load(self):
        """The model in its forms, what the process grew by with each, and which forms there are not, and why."""
        from ..evaluation.quantized import FORMS, MISSING, NotQuantized, has_torchao
        from ..evaluation.speed import prefill_seconds
        from ..system.machine import resident_memory

        args, models, resident, left_out = self.args, {}, {}, {}
        loads = {"dense": self._load_dense, "packed": self._load_packed}
        if self.few_bits:
            loads[", ".join([*self.few_bits, args.activations])] = self._load_coded
        if has_torchao() and not args.no_torchao:
            loads |= {form: partial(self._load_quantized, form, models) for form in FORMS}
        elif not args.no_torchao:
            left_out[" and ".join(FORMS)] = MISSING
        device, before = device_of(args), resident_memory()
        for name, load in loads.items():
            try:
                models[name] = load().to(device)
            except NotQuantized as error:
                left_out[name] = str(error)
                continue
            prefill_seconds(models[name], 8)  # what is mapped from disk is read when it is used
            now = resident_memory()
            if now is not None:
                resident[name] = now - before
                before = now
        return models, resident, left_out

    def _load_dense(self):
        from ..checkpoint.safe_files import load_checkpoint

        return load_checkpoint(self.args.model, **load_options(self.args))

    def _load_packed(self):
        """The model with packed values as they are, also where the checkpoint holds codes that are to be timed beside."""
        from .. import SparseModelForCausalLM, sparsify

        if self.few_bits:
            return sparsify(self._load_dense())
        return SparseModelForCausalLM.from_pretrained(self.args.model, **load_options(self.args))

    def _load_coded(self):
        from .. import sparsify

        return sparsify(self._load_dense(), self.args.value_bits, self.args.activations, self.args.embedding_bits)

    def _load_quantized(self, form: str, models: dict):
        """The dense model, of which torchao quantised what the packed one has packed."""
        from ..evaluation.quantized import quantize
        from ..model.packed_modules import packed_modules

        names = [name for name, _ in packed_modules(models["packed"])]
        return quantize(self._load_dense().to(device_of(self.args)), names, form)
