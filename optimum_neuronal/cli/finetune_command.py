"""`optimum-cli neuronal finetune`, from a sparse model to a sparse model that has learned from the dense one."""

import argparse
from dataclasses import fields
from pathlib import Path

from ..checkpoint.hub import check_push
from ..common.processes import process_group
from ..data.documents import read_prompts
from ..evaluation.answers import Answers
from ..files.records import hidden_directory
from ..model.load_model import checkpoint_dtype
from ..model.origin import find_tokenizer
from ..training.finetune import finetune
from ..training.finetune_config import AMOUNTS, FinetuneConfig
from . import flags
from .command import Command, write, write_saved


FIELDS = {entry.name: entry for entry in fields(FinetuneConfig)}
TEXT = ("dataset", "seq_length", "batch_size", "seed", "add_bos")
METHOD = ("kl_weight", "learning_rate", "lora")


class FinetuneCommand(Command):
    NAME = "finetune"
    HELP = "Train a sparse model toward the predictions of its dense model. The sparsity pattern doesn't change."
    USAGE = "--model SPARSE --output DIR [flags]"
    EXAMPLES = (
        "--model qwen-sparse --minutes 10 --output qwen-tuned --evaluate wikitext2",
        "--model qwen-sparse --teacher Qwen/Qwen3-0.6B --dataset chat.jsonl --tokens 2000000 --output qwen-tuned",
    )

    NEEDS = flags.RESULT_NEEDS

    @staticmethod
    def add_flags(parser: argparse.ArgumentParser) -> None:
        main, result, amount, text, method, rare = (
            parser.add_argument_group(name)
            for name in ("model", "result", "how much", "text", "method", "rarely needed")
        )
        main.add_argument("--model", required=True, help="Hub id or directory of a sparse model (required)")
        teacher = "Hub id or directory of the dense model (default: the one that the sparse model was pruned from)"
        main.add_argument("--teacher", help=teacher)
        main.add_argument("--device", help="cpu, or the accelerator's name (default: the accelerator if there is one)")
        flags.add_result_flags(result, "the sparse model's", "none")
        for group, names in ((amount, AMOUNTS), (text, TEXT), (method, METHOD)):
            flags.add_config_flags(group, names, {"dataset": "c4"}, FIELDS)
        others = (name for name in FIELDS if name not in (*AMOUNTS, *TEXT, *METHOD))
        flags.add_config_flags(rare, others, known=FIELDS)
        work_dir = "checkpoints, from which the same command resumes (default: hidden, next to the output)"
        rare.add_argument("--work-dir", help=work_dir)
        rare.add_argument("--revision", help="branch, tag or commit of the model on the Hub (default: main)")
        flags.add_switch(rare, "--trust-remote-code", "run code that comes with the model")

    def config(self) -> FinetuneConfig:
        return FinetuneConfig(**{name: value for name, value in vars(self.args).items() if name in FIELDS})

    def check(self) -> None:
        if "teacher" in self.given and self.config().kl_weight == 0:
            raise ValueError("--teacher changes nothing with --kl-weight 0: leave one of them out.")

    def work(self) -> None:
        args, options = self.args, flags.load_options(self.args)
        if args.push_to_hub:
            check_push(args.push_to_hub, overwrite=args.overwrite)
        dtype = flags.save_options_of(args).dtype
        answers = args.answers if isinstance(args.answers, bool) else read_prompts(args.answers)
        with process_group() as processes:
            model, report = finetune(
                args.model,
                args.output,
                self.config(),
                teacher=args.teacher,
                evaluate=args.evaluate,
                window=args.window,
                max_windows=args.max_windows,
                answers=answers,
                format=args.format,
                save_dtype=dtype,
                work_dir=args.work_dir,
                overwrite=args.overwrite,
                device=flags.device_of(args),  # after the process group has chosen one
                **options,
            )
            if processes.rank > 0:
                return
            if report is not None:
                write(f"\n{report}")
                if compared := report.training[-1]["answers"]:
                    write(f"\n{Answers(**compared['after'])}")
            tokenizer = args.push_to_hub and find_tokenizer(args.output)
            write_saved(args, model, report, tokenizer, dtype or checkpoint_dtype(model))

    def unfinished(self) -> str | Path | None:
        return self.args.work_dir or hidden_directory(self.args.output)
