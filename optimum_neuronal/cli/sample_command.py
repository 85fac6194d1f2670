"""`optimum-cli neuronal sample`: text that a model generates, as a file that other commands take as `--dataset`."""

import argparse
import hashlib
import json
import os
from pathlib import Path

from ..data.documents import read_prompts
from ..data.sample_text import MAX_NEW_TOKENS, NUM_SAMPLES, TEMPERATURE, TOP_P, Writer, check_sampling, sample_text
from ..data.token_windows import text_tokenizer
from ..evaluation.perplexity import check_language_model
from ..files.output import write_atomically
from ..files.records import Records, checksum, hidden_directory, remove_records, work_directory
from ..model.load_model import load_model, load_skeleton
from ..model.origin import find_tokenizer
from . import flags
from .command import Command, write


class SampleCommand(Command):
    NAME = "sample"
    HELP = "Generate calibration or training text with the dense model."
    USAGE = "--model MODEL --output FILE.jsonl [flags]"
    EXAMPLES = (
        "--model Qwen/Qwen3-0.6B --output qwen3.jsonl",
        "--model Qwen/Qwen3-0.6B --prompts questions.txt --max-new-tokens 4096 --output answers.jsonl",
    )

    @staticmethod
    def add_flags(parser: argparse.ArgumentParser) -> None:
        flags.add_model_flags(parser)
        parser.add_argument("--output", required=True, metavar="FILE", help="file to write, .jsonl (required)")
        prompts = "prompts to answer: lines of text, or rows of conversations (default: the model writes its own)"
        parser.add_argument("--prompts", metavar="FILE", help=prompts)
        samples = "conversations to write, or documents if the model has no chat template"
        number = f"{samples} (default: one for each prompt, or {NUM_SAMPLES})"
        parser.add_argument("--num-samples", type=int, help=number)
        length = f"tokens in each answer or document, at most (default: {MAX_NEW_TOKENS})"
        parser.add_argument("--max-new-tokens", type=int, default=MAX_NEW_TOKENS, help=length)
        temperature = f"from 0.01 to 100; 1 is the model's own distribution (default: {TEMPERATURE:g})"
        parser.add_argument("--temperature", type=float, default=TEMPERATURE, help=temperature)
        top_p = f"draw from the likeliest tokens whose probabilities sum to this (default: {TOP_P})"
        parser.add_argument("--top-p", type=float, default=TOP_P, help=top_p)
        parser.add_argument("--seed", type=int, default=0, help="seed of the draws (default: 0)")

    def check(self) -> None:
        args, output = self.args, Path(self.args.output)
        if output.suffix != ".jsonl":
            raise ValueError(f"--output is {args.output}: expected a file whose name ends in .jsonl.")
        if os.path.lexists(output):
            raise FileExistsError(f"{output} exists: choose another --output, or delete it.")
        check_sampling(args.num_samples, args.max_new_tokens, args.temperature, args.top_p)

    def work(self) -> None:
        args, output, device = self.args, Path(self.args.output).absolute(), flags.device_of(self.args)
        with work_directory(self.unfinished()) as folder:
            source = flags.source_of(args)
            tokenizer = find_tokenizer(source)
            if tokenizer is None:
                raise ValueError(f"No tokenizer can be loaded from {args.model}, and text needs one.")
            prompts = args.prompts and read_prompts(args.prompts)
            skeleton = load_skeleton(source)  # so that what does not fit is an error before weights are loaded
            check_language_model(skeleton)
            Writer(skeleton, tokenizer, prompts, args.max_new_tokens, {})
            model = load_model(source).to(device)
            names = ("num_samples", "max_new_tokens", "temperature", "top_p", "seed")
            how = {name: getattr(args, name) for name in names}
            made_with = {
                **how,
                "prompts": hashlib.sha256(repr(prompts).encode()).hexdigest(),
                "model": checksum(model),
                "device": device.type,
                "chat template": hashlib.sha256(repr(text_tokenizer(tokenizer).chat_template).encode()).hexdigest(),
            }
            rows = [*sample_text(model, tokenizer, prompts=prompts, **how, records=Records(folder, made_with))]
            write_atomically(output, "".join(json.dumps(row) + "\n" for row in rows).encode(), is_new=True)
            remove_records(folder)
        kind = "conversations" if "messages" in rows[0] else "documents"
        write(f"Wrote {len(rows):,} {kind} to {args.output}. Use it as --dataset {args.output}.")

    def unfinished(self) -> str | Path | None:
        return hidden_directory(self.args.output)
