"""`optimum-cli neuronal evaluate` and `compare`: what models lose. Imports nothing heavy, see `command`."""

import argparse
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from optimum.commands.base import CommandInfo

from ..config_fields import DATASETS
from .command import Command, write
from .config_flags import CONFIG_FLAGS, add_config_flags, methods
from .flags import add_memory_flags, add_model_flags, add_task_flags, device_of, load_options
from .parser import count, share, value_bits


if TYPE_CHECKING:
    from ..comparing.settings import ComparisonSettings


class EvaluateCommand(Command):
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
            "--dataset", nargs="+", default=["wikitext2"], help=f"test text: {DATASETS} (default: wikitext2)"
        )
        parser.add_argument(
            "--seq-length",
            type=count,
            help="tokens per window (default: the smaller of 2048 and what the model admits)",
        )
        parser.add_argument("--max-windows", type=count, help="measure on the first so many windows (default: all)")
        parser.add_argument("--batch-size", type=count, default=1, help="windows per forward (default: 1)")
        add_task_flags(parser)

    def work(self) -> None:
        from transformers import AutoTokenizer

        from ..checkpoint.safe_files import load_checkpoint
        from ..data.documents import check_dataset
        from ..display import format_table
        from ..evaluation.perplexity import evaluate_perplexity

        args, options, device = self.args, load_options(self.args), device_of(self.args)
        for dataset in args.dataset:
            check_dataset(dataset, "test")
        if args.tasks:
            from ..evaluation.tasks import check_tasks

            check_tasks(args.tasks, args.include_path, args.limit)
        model = load_checkpoint(args.model, **options).to(device)
        options.pop("dtype")
        tokenizer = AutoTokenizer.from_pretrained(args.model, **options)
        rows = []
        for dataset in args.dataset:
            perplexity = evaluate_perplexity(
                model, tokenizer, dataset, args.seq_length, max_windows=args.max_windows, batch_size=args.batch_size
            )
            rows.append([dataset, f"{perplexity:.2f}"])
        write("\n" + format_table(["dataset", "perplexity"], rows))
        if args.tasks:
            from ..evaluation.tasks import evaluate_tasks

            results = evaluate_tasks(
                model,
                tokenizer,
                args.tasks,
                limit=args.limit,
                batch_size=args.batch_size,
                include_path=args.include_path,
            )
            write("\n" + format_table(["task", "accuracy", "standard error"], task_rows(results)))


def task_rows(results: Mapping[str, Any]) -> list[list[str]]:
    """Rows of a table: task, accuracy, standard error; the mean last."""
    rows = [
        [name, f"{result.accuracy:.2%}", "-" if result.stderr is None else f"{result.stderr:.2%}"]
        for name, result in results.items()
    ]
    mean = sum(result.accuracy for result in results.values()) / len(results)
    return [*rows, ["mean", f"{mean:.2%}", ""]]


class CompareCommand(Command):
    COMMAND = CommandInfo(name="compare", help="Prune a model in many ways and compare what each loses.")
    OWN = (
        "sparsity",
        "saliency",
        "topup",
        "value_bits",
        "bits_per_weight",
        "dataset",
        "pattern",
        "embedding_bits",
    )
    USAGE = "--model MODEL [flags]"
    EXAMPLES = (
        "--model Qwen/Qwen3-0.6B --sparsity 0.6 0.7 --topup uniform owl search --plots",
        "--model Qwen/Qwen3-0.6B --saliency wanda alps --dataset my-text.txt --evaluate my-test.txt",
        "--model Qwen/Qwen3-0.6B --sparsity 0.5 0.6 --topup search --value-bits none 4 3 --plots",
    )

    @classmethod
    def parse_args(cls, parser: argparse.ArgumentParser) -> None:
        add_model_flags(parser)
        several: dict[str, Any] = {"nargs": "+", "default": argparse.SUPPRESS}
        parser.add_argument(
            "--saliency", **several, help=f"how weights are scored: {methods('saliency')} (default: wanda)"
        )
        parser.add_argument(
            "--topup",
            **several,
            help=f"where the sparsity goes: {methods('topup')}; with hyper-parameters: owl:half_width=0.1 "
            "(default: uniform neuronal search)",
        )
        parser.add_argument(
            "--sparsity", **several, type=share, help="shares of weights to set to zero (default: 0.6 0.7 0.8)"
        )
        parser.add_argument(
            "--value-bits",
            **several,
            type=value_bits,
            metavar="N",
            help="round the kept values to so many bits: 8, 4, 3 or 2; none: leave them as they are (default: none)",
        )
        parser.add_argument("--dataset", default="c4", help=f"calibration text: {DATASETS} (default: c4)")
        parser.add_argument(
            "--evaluate", nargs="+", default=["wikitext2"], help="test text, of the same kinds (default: wikitext2)"
        )
        parser.add_argument("--max-windows", type=count, help="measure on the first so many windows (default: all)")
        add_task_flags(parser)
        parser.add_argument(
            "--output",
            default="comparison",
            help="directory for tables and finished combinations; a second run goes on there (default: comparison)",
        )
        parser.add_argument(
            "--overwrite",
            action="store_true",
            help="run again what is finished in that directory, and replace files there that no comparison wrote "
            "(default: no)",
        )
        parser.add_argument(
            "--plots", action="store_true", help="draw the figures too; needs the extra [report] (default: no)"
        )
        add_memory_flags(parser)
        add_config_flags(parser, without=cls.OWN)

    def work(self) -> None:
        from transformers import AutoTokenizer

        from ..checkpoint.safe_files import load_checkpoint
        from ..comparing.comparing import run_comparison

        args, options, device = self.args, load_options(self.args), device_of(self.args)
        settings = self._check()
        model = load_checkpoint(args.model, **options).to(device)
        options.pop("dtype")
        tokenizer = AutoTokenizer.from_pretrained(args.model, **options)
        comparison = run_comparison(model, tokenizer, settings, args.output, args.overwrite)
        write(f"\n{comparison}\n\nSaved in {args.output}: comparison.md, .csv and .json")
        if args.plots:
            write(", ".join(path.name for path in comparison.plot(args.output, args.overwrite).paths))
        if comparison.failed:
            sys.exit(
                f"compare: {len(comparison.failed)} of {len(comparison.results)} combinations failed, see the table"
            )

    def _check(self) -> "ComparisonSettings":
        """Return the settings, checked before the model is loaded."""
        from ..comparing.comparison import FIGURES, TABLES, check_output
        from ..comparing.settings import ComparisonSettings
        from ..figure_style import check_matplotlib

        args = self.args
        if args.plots:
            check_matplotlib()
        check_output(args.output, args.overwrite, [*TABLES, *FIGURES] if args.plots else TABLES)
        lists = {"saliency": "saliencies", "topup": "topups", "sparsity": "sparsities", "value_bits": "value_bits"}
        return ComparisonSettings(
            **{plural: getattr(args, name) for name, plural in lists.items() if hasattr(args, name)},
            dataset=args.dataset,
            evaluate=args.evaluate,
            config={field: value for field, value in vars(args).items() if field in CONFIG_FLAGS.keys() - {*self.OWN}},
            max_windows=args.max_windows,
            tasks=args.tasks,
            limit=args.limit,
            include_path=args.include_path,
            batch_size=args.batch_size,
            max_hidden_bytes=args.max_hidden_bytes,
        )

    def after_interrupt(self) -> str:
        return f": the same command goes on from what is finished in {self.args.output}"
