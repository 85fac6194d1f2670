"""`optimum-cli neuronal speed` and `env`, which show what packed weights bring on this machine, and what computes here."""

import argparse
import json
from dataclasses import asdict
from functools import partial
from pathlib import Path

from optimum.commands.base import CommandInfo

from .command import Command, write
from .flags import add_json_flag, add_model_flags, add_switch, count, device_of, load_options


class SpeedCommand(Command):
    """Command that times a sparse model with dense weights, packed ones, and others."""

    COMMAND = CommandInfo(name="speed", help="Measure a sparse model with dense and with packed weights, in turns.")
    USAGE = "--model MODEL [flags]"
    EXAMPLES = (
        "--model qwen-sparse --dtype bfloat16",
        "--model qwen-sparse --bits 4 --embedding-bits 8",
        "--model qwen-sparse --batches 1 16 --plots speed",
        "--model qwen-sparse --threads 4 --llama-cpp qwen-q4_0.gguf",
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
            "--bits", type=int, choices=range(2, 9), metavar="N",
            help="time the projections rounded to 2 to 8 bits, too; how well they are rounded does not matter (default: no)",
        )  # fmt: skip
        parser.add_argument(
            "--embedding-bits", type=int, choices=(8,), metavar="N",
            help="time packed weights with token embeddings and head of 8 bits, too (default: no)",
        )  # fmt: skip
        without = "leave out int8 and int4 weight-only by torchao, which are timed where it is installed"
        add_switch(parser, "--no-torchao", without)
        parser.add_argument(
            "--llama-cpp", metavar="FILE",
            help="a GGUF file to time beside, by llama.cpp's programs, which have to be on PATH (default: no)",
        )  # fmt: skip
        parser.add_argument("--threads", type=count, help="of torch (default: as torch decides)")
        add_json_flag(parser)
        parser.add_argument(
            "--plots", metavar="FILE", help="draw a figure, FILE.png and FILE.svg; needs the extra [report] (default: no)"
        )  # fmt: skip

    def check(self) -> None:
        from ..evaluation.llama_cpp import check_gguf

        if self.args.llama_cpp:
            check_gguf(self.args.llama_cpp)
        super().check()

    def work(self) -> None:
        import torch

        from ..evaluation.llama_cpp import format_beside, measure_gguf
        from ..evaluation.quantized import EAGER, FORMS
        from ..evaluation.speed import measure_speed
        from ..evaluation.speed_figure import plot_speed
        from ..files.atomic import write_durably

        args = self.args
        if args.threads:
            torch.set_num_threads(args.threads)
        models, resident, left_out = self._load()
        numbers = (args.batches, args.prompt_tokens, args.new_tokens, args.rounds)
        report = measure_speed(models.pop("dense"), models.pop("packed"), *numbers, resident, models, left_out)
        found, beside = report.to_dict(), ""
        if args.llama_cpp:
            gguf = measure_gguf(args.llama_cpp, report.threads, *numbers, cpu=report.device == "cpu")
            found["llama_cpp"], beside = asdict(gguf), f"\n\n{format_beside(report, gguf)}"
        write(json.dumps(found, indent=2) if args.json else f"\n{report}{beside}")
        if FORMS.keys() & models.keys() and not args.json:
            write(EAGER)
        if args.plots:
            for suffix, content in plot_speed(report).items():
                write_durably(Path(args.plots + suffix), content)

    def _load(self):
        """Return the model in its forms, the growth of the process with each, and the reasons why some are missing."""
        from .. import SparseModelForCausalLM, densify, sparsify
        from ..checkpoint.safe_files import load_checkpoint
        from ..common.machine import resident_memory
        from ..evaluation.quantized import FORMS, MISSING, NotQuantized, has_torchao, quantize
        from ..evaluation.speed import prefill_seconds
        from ..model.packed_modules import packed_modules

        args, models, resident, left_out = self.args, {}, {}, {}
        device, before = device_of(args), resident_memory()
        bits, head = args.bits, args.embedding_bits
        few_bits = [f"{bits} bits"] * bool(bits) + [f"{head}-bit head"] * bool(head)

        def load_dense():
            return densify(load_checkpoint(args.model, **load_options(args)))  # quantised weights arrive packed

        def load_packed():
            return SparseModelForCausalLM.from_pretrained(args.model, **load_options(args))

        def load_quantized(form: str):
            names = [name for name, _ in packed_modules(models["packed"])]  # torchao quantises what is packed
            return quantize(load_dense().to(device), names, form)

        loads = {"dense": load_dense, "packed": load_packed}
        if few_bits:
            loads[", ".join(few_bits)] = lambda: sparsify(load_dense(), bits, head)
        if has_torchao() and not args.no_torchao:
            loads |= {form: partial(load_quantized, form) for form in FORMS}
        elif not args.no_torchao:
            left_out[" and ".join(FORMS)] = MISSING
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


class EnvCommand(Command):
    """Command that shows what computes here."""

    COMMAND = CommandInfo(name="env", help="Show versions, processor, accelerators and the kernels in use.")
    EXAMPLES = ("", "--json")

    @staticmethod
    def parse_args(parser: argparse.ArgumentParser) -> None:
        add_json_flag(parser)

    def work(self) -> None:
        from ..common.display import format_table
        from ..packed.environment import describe_environment

        found = describe_environment()
        rows = [[name, str(value)] for name, value in found.items()]
        write(json.dumps(found, indent=2) if self.args.json else "\n" + format_table(["", "here"], rows))
