"""`optimum-cli neuronal sample`: text that a model writes itself, as a file that other commands take as `--dataset`."""

import argparse
import hashlib
import json
from pathlib import Path

from ..data.sample_text import MAX_LENGTH, NUM_SAMPLES, TEMPERATURE, TOP_P, check_sampling, sample_text
from ..data.token_windows import text_tokenizer
from ..files.atomic import write_atomically
from ..files.directories import check_writable
from ..files.identity import checksum
from ..files.records import Records, hidden_directory, remove_records, work_directory
from ..model.load_model import load_model
from . import flags
from .command import Command, write


class SampleCommand(Command):
    NAME = "sample"
    HELP = "Let a dense model write text, to calibrate and to train with."
    USAGE = "--model MODEL --output FILE.jsonl [flags]"
    EXAMPLES = ("--model Qwen/Qwen3-0.6B --output qwen3.jsonl", "--model gpt2 --num-samples 128 --output gpt2.jsonl")

    @staticmethod
    def add_flags(parser: argparse.ArgumentParser) -> None:
        flags.add_model_flags(parser)
        parser.add_argument("--output", required=True, metavar="FILE", help="file to write, .jsonl (required)")
        samples = "conversations to write, or documents if the model has no chat template"
        parser.add_argument("--num-samples", type=int, default=NUM_SAMPLES, help=f"{samples} (default: {NUM_SAMPLES})")
        length = f"tokens in each, at most (default: {MAX_LENGTH})"
        parser.add_argument("--max-length", type=int, default=MAX_LENGTH, help=length)
        temperature = f"above 0; 1 is the model's own distribution (default: {TEMPERATURE:g})"
        parser.add_argument("--temperature", type=float, default=TEMPERATURE, help=temperature)
        top_p = f"draw from the likeliest tokens whose probabilities sum to this (default: {TOP_P})"
        parser.add_argument("--top-p", type=float, default=TOP_P, help=top_p)
        parser.add_argument("--seed", type=int, default=0, help="seed of the draws (default: 0)")

    def check(self) -> None:
        args, output = self.args, Path(self.args.output)
        if output.suffix != ".jsonl":
            raise ValueError(f"--output is {args.output}: expected a file whose name ends in .jsonl.")
        if output.exists():
            raise FileExistsError(f"{output} exists: choose another --output, or delete it.")
        check_writable(output.absolute().parent, "save in")
        check_sampling(args.num_samples, args.temperature, args.top_p)

    def work(self) -> None:
        args, output, device = self.args, Path(self.args.output), flags.device_of(self.args)
        options = flags.load_options(args)
        tokenizer = flags.tokenizer_of(args, options)
        if tokenizer is None:
            raise ValueError(f"{args.model} has no tokenizer, which is needed to write text.")
        model = load_model(args.model, **options).to(device)
        how = {name: getattr(args, name) for name in ("num_samples", "max_length", "temperature", "top_p", "seed")}
        made_with = {
            **how,
            "model": checksum(model),
            "device": device.type,
            "chat template": hashlib.sha256(repr(text_tokenizer(tokenizer).chat_template).encode()).hexdigest(),
        }
        with work_directory(hidden_directory(output)) as folder:
            rows = [*sample_text(model, tokenizer, **how, records=Records(folder, made_with))]
            output.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(output, "".join(json.dumps(row) + "\n" for row in rows).encode())
            remove_records(folder)
        kind = "conversations" if "messages" in rows[0] else "documents"
        write(f"Wrote {len(rows):,} {kind} to {output}. Use it as --dataset {output}.")

    def after_interrupt(self) -> str:
        folder = hidden_directory(self.args.output)
        return f": the same command continues; to start over, delete {folder}" if folder.exists() else ""
