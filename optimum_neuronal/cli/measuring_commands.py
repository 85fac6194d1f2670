"""`optimum-cli neuronal evaluate`, `speed` and `env`, which measure a model and this machine."""

import argparse
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..common.display import format_table
from ..config.config_fields import DATASETS
from ..data.known_datasets import check_datasets
from ..evaluation.perplexity import load_tests, measure
from ..evaluation.speed import measure_speed
from ..evaluation.tasks import load_tasks
from ..model.load_model import load_model
from ..native.library import describe_environment
from ..packed.packed_module import packed_modules
from ..packed.sparsify import densify, sparsify
from . import flags
from .command import Command, write


class EvaluateCommand(Command):
    NAME = "evaluate"
    HELP = "Measure a model's perplexity and zero-shot accuracy."
    USAGE = "--model MODEL [flags]"
    EXAMPLES = (
        "--model qwen-sparse --dataset wikitext2",
        "--model qwen-sparse --dataset my-text.txt --tasks paper --limit 100",
    )

    @staticmethod
    def add_flags(parser: argparse.ArgumentParser) -> None:
        flags.add_model_flags(parser)
        text = f"test text: {DATASETS} (default: wikitext2; none with --tasks)"
        parser.add_argument("--dataset", nargs="+", help=text)
        flags.add_test_flags(parser)
        flags.add_config_flags(parser, ["add_bos"])
        flags.add_memory_flags(parser, prunes=False)

    def work(self) -> None:
        args, device = self.args, flags.device_of(self.args)
        memory, datasets = flags.memory_of(args), args.dataset or ([] if args.tasks else ["wikitext2"])
        check_datasets(datasets)
        tasks = load_tasks(args.tasks or (), args.limit, args.include_path)  # raises before the model is loaded
        scratch = Path(tempfile.gettempdir()) / f"neuronal-{os.getpid()}"
        with flags.loaded(args, flags.source_of(args), device, scratch) as (model, tokenizer):
            bos, named = getattr(args, "add_bos", None), {name: name for name in datasets}
            tests = load_tests(named, model, tokenizer, args.window, args.max_windows, bos)
            rows = [
                [name, f"{perplexity:.2f}", *tests[name].ids.shape, "yes" if tests[name].begin_with_bos else "no"]
                for name, perplexity in measure(model, tests, memory.batch_size).items()
            ]
            if rows:
                write("\n" + format_table(["dataset", "perplexity", "windows", "tokens in each", "BOS first"], rows))
            if args.tasks:
                results = tasks.measure(model, tokenizer, memory.batch_size, bos)
                write("\n" + format_table(["task", "accuracy", "standard error", "questions"], task_rows(results)))


def task_rows(results: Mapping[str, Any]) -> list[list[str]]:
    """Return rows of a table: task, accuracy, its standard error, questions asked. The last row is the mean."""
    rows = [
        [name, f"{one.accuracy:.2%}", "-" if one.stderr is None else f"{one.stderr:.2%}", str(one.samples)]
        for name, one in results.items()
    ]
    mean = sum(result.accuracy for result in results.values()) / len(results)
    return [*rows, ["mean", f"{mean:.2%}", "", ""]]


class SpeedCommand(Command):
    NAME = "speed"
    HELP = "Time a sparse model with dense and with packed weights, alternating between both."
    USAGE = "--model MODEL [flags]"
    EXAMPLES = ("--model qwen-sparse --dtype bfloat16", "--model qwen-sparse --batches 1 16 --threads 4")

    @staticmethod
    def add_flags(parser: argparse.ArgumentParser) -> None:
        flags.add_model_flags(parser)
        batches = "sequences at a time (default: 1 4 8)"
        parser.add_argument("--batches", nargs="+", type=int, default=[1, 4, 8], help=batches)
        parser.add_argument("--prompt-tokens", type=int, default=512, help="tokens of the prefill (default: 512)")
        parser.add_argument("--new-tokens", type=int, default=32, help="tokens to generate (default: 32)")
        parser.add_argument("--rounds", type=int, default=5, help="timed runs of each form (default: 5)")
        parser.add_argument("--threads", type=int, help="threads of torch (default: as torch decides)")

    def work(self) -> None:
        args, device = self.args, flags.device_of(self.args)
        if args.threads:
            torch.set_num_threads(args.threads)
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
