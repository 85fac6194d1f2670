"""`optimum-cli neuronal evaluate`, `answers`, `speed` and `env`, which measure a model and this machine."""

import argparse
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from ..common.display import format_table
from ..common.validation import check_count
from ..config.config_fields import DATASETS
from ..data.documents import read_prompts
from ..evaluation.answers import MAX_NEW_TOKENS, DenseAnswers
from ..evaluation.perplexity import load_tests, measure
from ..evaluation.speed import measure_speed
from ..evaluation.tasks import ACCURACY, TaskResult, evaluate_tasks, load_tasks
from ..model.load_model import load_model
from ..model.origin import find_tokenizer, read_base_model
from ..native.library import describe_environment
from ..packed.packed_module import packed_modules
from ..packed.sparsify import densify, sparsify
from . import flags
from .command import Command, write


class EvaluateCommand(Command):
    NAME = "evaluate"
    HELP = "Measure a model's perplexity, and its scores on tasks."
    USAGE = "--model MODEL [flags]"
    EXAMPLES = (
        "--model qwen-sparse --dataset wikitext2",
        "--model qwen-sparse --dataset my-text.txt --tasks paper --limit 100",
    )
    NEEDS = {"include_path": "tasks", "apply_chat_template": "tasks"}

    @staticmethod
    def add_flags(parser: argparse.ArgumentParser) -> None:
        flags.add_model_flags(parser)
        text = f"test text: {DATASETS} (default: wikitext2; none with --tasks)"
        parser.add_argument("--dataset", nargs="+", help=text)
        flags.add_test_flags(parser)
        flags.add_switch(parser, "--apply-chat-template", "ask each question of a task as a user's turn")
        flags.add_config_flags(parser, ["add_bos"])
        flags.add_memory_flags(parser, prunes=False)

    def work(self) -> None:
        args = self.args
        memory, datasets = flags.memory_of(args), args.dataset or ([] if args.tasks else ["wikitext2"])
        if not datasets and self.given & {"window", "max_windows"}:
            raise ValueError("--window and --max-windows change nothing without test text: name it with --dataset.")
        tasks = load_tasks(args.tasks or (), args.limit, args.include_path)  # raises before the model is loaded
        scratch = Path(tempfile.gettempdir()) / f"neuronal-{os.getpid()}"
        with flags.loaded(args, flags.source_of(args), scratch, tests=datasets) as (model, tokenizer):
            bos, named = getattr(args, "add_bos", None), {name: name for name in datasets}
            tests = load_tests(named, model, tokenizer, args.window, args.max_windows, bos)
            rows = [
                [name, f"{perplexity:.2f}", *tests[name].ids.shape, "yes" if tests[name].begin_with_bos else "no"]
                for name, perplexity in measure(model, tests, memory.batch_size).items()
            ]
            if rows:
                write("\n" + format_table(["dataset", "perplexity", "windows", "tokens in each", "BOS first"], rows))
            if args.tasks:
                how = {"batch_size": memory.batch_size, "apply_chat_template": args.apply_chat_template}
                results = evaluate_tasks(model, tokenizer, tasks, add_bos=bos, **how)
                write(f"\n{task_table(results)}")


def task_table(results: Mapping[str, TaskResult]) -> str:
    """Return the scores as a table. The last row is the mean accuracy, if all tasks have one."""

    def shown(one: TaskResult, value: float | None) -> str:
        return "-" if value is None else f"{value:.2%}" if one.metric == ACCURACY else f"{value:.4g}"

    headers = ["task", "metric", "score", "standard error", "questions"]
    rows = [
        [name, one.metric, shown(one, one.score), shown(one, one.stderr), str(one.samples)]
        for name, one in results.items()
    ]
    if any(one.mean_length is not None for one in results.values()):
        headers += ["tokens in an answer", "cut off"]
        for row, one in zip(rows, results.values()):
            row += ["", ""] if one.mean_length is None else [f"{one.mean_length:.0f}", f"{one.cut_off:.1%}"]
    if all(one.metric == ACCURACY for one in results.values()):
        rows.append(["mean", ACCURACY, f"{sum(one.score for one in results.values()) / len(results):.2%}", "", ""])
    return format_table(headers, rows)


class AnswersCommand(Command):
    NAME = "answers"
    HELP = "Compare a sparse model's answers with its dense model's."
    USAGE = "--model SPARSE [--teacher DENSE] [flags]"
    EXAMPLES = ("--model qwen-sparse", "--model qwen-sparse --teacher Qwen/Qwen3-0.6B --prompts prompts.jsonl")

    @staticmethod
    def add_flags(parser: argparse.ArgumentParser) -> None:
        flags.add_model_flags(parser)
        teacher = "Hub id or directory of the dense model (default: the one that the sparse model was pruned from)"
        parser.add_argument("--teacher", help=teacher)
        prompts = "text lines, or conversations whose last turn is the user's (default: 48 built-in questions)"
        parser.add_argument("--prompts", metavar="FILE", help=prompts)
        length = f"tokens in an answer, at most (default: {MAX_NEW_TOKENS})"
        parser.add_argument("--max-new-tokens", type=int, default=MAX_NEW_TOKENS, help=length)

    def work(self) -> None:
        args, device = self.args, flags.device_of(self.args)
        prompts = args.prompts and read_prompts(args.prompts)
        check_count("max_new_tokens", args.max_new_tokens, 1)
        source = flags.source_of(args)
        teacher = args.teacher or read_base_model(*source)
        dense = load_model(teacher, **{**flags.load_options(args), "revision": "main"}).to(device)
        answers = DenseAnswers(dense, find_tokenizer(source), prompts, args.max_new_tokens)
        del dense  # before the sparse model is loaded
        write(f"\n{answers.compare(load_model(source).to(device))}")


class SpeedCommand(Command):
    NAME = "speed"
    HELP = "Time a sparse model with dense and with packed weights, alternating between both."
    USAGE = "--model MODEL [flags]"
    EXAMPLES = ("--model qwen-sparse --dtype bfloat16", "--model qwen-sparse --batches 1 16")

    @staticmethod
    def add_flags(parser: argparse.ArgumentParser) -> None:
        flags.add_model_flags(parser)
        batches = "sequences at a time (default: 1 4 8)"
        parser.add_argument("--batches", nargs="+", type=int, default=[1, 4, 8], help=batches)
        parser.add_argument("--prompt-tokens", type=int, default=512, help="tokens of the prefill (default: 512)")
        parser.add_argument("--new-tokens", type=int, default=32, help="tokens to generate (default: 32)")
        parser.add_argument("--rounds", type=int, default=5, help="timed runs of each form (default: 5)")

    def work(self) -> None:
        args, device = self.args, flags.device_of(self.args)
        source = flags.source_of(args)
        dense = densify(load_model(source)).to(device)
        packed = load_model(source)
        if next(packed_modules(packed), None) is None:
            packed = sparsify(packed)
        numbers = (args.batches, args.prompt_tokens, args.new_tokens, args.rounds)
        write(f"\n{measure_speed(dense, packed.to(device), *numbers)}")


class EnvCommand(Command):
    NAME = "env"
    HELP = "Show versions, processor, accelerators and the kernels in use."
    EXAMPLES = ("",)

    def work(self) -> None:
        rows = [[name, str(value)] for name, value in describe_environment().items()]
        write("\n" + format_table(["", "here"], rows))
