"""`optimum-cli neuronal evaluate`, which measures perplexity and zero-shot accuracy."""

import argparse
from collections.abc import Mapping
from typing import Any

from optimum.commands.base import CommandInfo

from ..config.config_fields import DATASETS
from .command import Command, write
from .flags import add_model_flags, add_test_flags, device_of, load


class EvaluateCommand(Command):
    """Command that measures perplexity, and accuracy on zero-shot tasks."""

    COMMAND = CommandInfo(name="evaluate", help="Measure a model's perplexity.")
    USAGE = "--model MODEL [flags]"
    EXAMPLES = (
        "--model qwen-sparse --dataset wikitext2",
        "--model qwen-sparse --dataset my-text.txt --tasks paper --limit 100",
    )

    @staticmethod
    def parse_args(parser: argparse.ArgumentParser) -> None:
        add_model_flags(parser)
        parser.add_argument(
            "--dataset", nargs="+", help=f"test text: {DATASETS} (default: wikitext2; none with --tasks)"
        )
        parser.add_argument(
            "--seq-length", type=int, help="tokens per window (default: 2048, or the model's limit if that is less)"
        )
        parser.add_argument("--batch-size", type=int, default=1, help="windows per forward (default: 1)")
        add_test_flags(parser)

    def work(self) -> None:
        from ..common.display import format_table
        from ..evaluation.perplexity import evaluate_perplexity
        from ..evaluation.tasks import evaluate_tasks, load_tasks

        args = self.args
        device = device_of(args)
        if args.tasks:
            load_tasks(args.tasks, args.include_path)  # raises before the model is loaded
        model, tokenizer = load(args, device)
        rows = []
        for dataset in args.dataset or ([] if args.tasks else ["wikitext2"]):
            options = {"max_windows": args.max_windows, "batch_size": args.batch_size}
            rows.append([dataset, f"{evaluate_perplexity(model, tokenizer, dataset, args.seq_length, **options):.2f}"])
        if rows:
            write("\n" + format_table(["dataset", "perplexity"], rows))
        if args.tasks:
            options = {"limit": args.limit, "batch_size": args.batch_size, "include_path": args.include_path}
            results = evaluate_tasks(model, tokenizer, args.tasks, **options)
            write("\n" + format_table(["task", "accuracy", "standard error"], task_rows(results)))


def task_rows(results: Mapping[str, Any]) -> list[list[str]]:
    """Return rows of a table: task, accuracy, standard error. The last row is the mean."""
    rows = [
        [name, f"{result.accuracy:.2%}", "-" if result.stderr is None else f"{result.stderr:.2%}"]
        for name, result in results.items()
    ]
    mean = sum(result.accuracy for result in results.values()) / len(results)
    return [*rows, ["mean", f"{mean:.2%}", ""]]
