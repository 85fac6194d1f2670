"""`optimum-cli neuronal`: prune, evaluate, compare, demo; inspect and convert are in `checkpoint_commands`.

`optimum-cli` builds the parsers of all plug-ins at every start, so this module imports nothing heavy: what a command
needs is imported when it runs.
"""

import argparse
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo

from .checkpoint_commands import ConvertCommand, InspectCommand
from .command import Command, write


LAMBDAS = "0.01 0.02 0.03 0.04 0.05 0.06 0.07 0.08 0.09 0.1 0.12 0.15 0.2 0.25"
DATASETS = "c4, wikitext2, ptb; a Hub dataset as ID:SPLIT:COLUMN; or a local .txt, .jsonl or .parquet file (FILE or FILE:COLUMN)"


def methods(kind: str) -> str:
    """Names of the methods that come with the package, read off their files, so that none need be imported."""
    files = (Path(__file__).parent / kind).glob("*.py")
    found = (re.findall(r'^@register_\w+\("(\w+)"\)', file.read_text(encoding="utf-8"), re.M) for file in files)
    return ", ".join(sorted(name for names in found for name in names))


# Field of NeuronALConfig -> its default as text, how it is parsed, and what it means. A flag that is not given is left
# to the config; a test holds the defaults here to the config's.
CONFIG_FLAGS: dict[str, tuple[str | None, dict[str, Any], str]] = {
    "sparsity": (None, {"type": float, "required": True}, "share of the projections' weights to set to zero: 0.7"),
    "saliency": ("wanda", {}, f"how weights are scored: {methods('saliency')}; with hyper-parameters: ria:power=1.0"),
    "topup": (
        "search",
        {},
        f"where the sparsity goes: {methods('topup')}; with hyper-parameters: owl:half_width=0.1",
    ),
    "steps": ("both", {}, "steps of --topup neuronal: both, block or row"),
    "reference": ("sparse-stream", {}, "where dense activations come from: sparse-stream or dense"),
    "alignment_scope": ("sequence", {}, "alignment error by sequence (the paper) or pooled (its authors' code)"),
    "block_lambdas": (
        LAMBDAS,
        {"type": float, "nargs": "+", "metavar": "X"},
        "half-widths of the sparsity window, block step",
    ),
    "row_lambdas": (
        f"0.0 {LAMBDAS}",
        {"type": float, "nargs": "+", "metavar": "X"},
        "half-widths of the sparsity window, row step",
    ),
    "dataset": ("c4", {}, f"calibration text: {DATASETS}"),
    "num_samples": ("128", {"type": int}, "calibration sequences"),
    "num_alignment_samples": ("8", {"type": int}, "how many of them the top-up measures its candidates on"),
    "seq_length": ("the smaller of 2048 and what the model admits", {"type": int}, "tokens per sequence"),
    "batch_size": (
        "what makes about 2048 tokens",
        {"type": int},
        "sequences per forward: memory and speed, not the result",
    ),
    "max_hidden_bytes": (
        "they stay on the device",
        {"type": int},
        "hidden states beyond this many bytes wait in CPU memory: memory and speed, not the result",
    ),
    "min_expert_tokens": (
        "32",
        {"type": int},
        "an expert that receives fewer calibration tokens is pruned as if all its inputs were equally active",
    ),
    "seed": ("0", {"type": int}, "seed of the draw of calibration sequences"),
    "targets": (
        "all projections",
        {"nargs": "+", "metavar": "REGEX"},
        "regular expressions: prune only modules whose names match",
    ),
    "ignore": ("none", {"nargs": "+", "metavar": "REGEX"}, "regular expressions: leave out modules whose names match"),
    "pattern": (
        "zeros may lie anywhere in a row",
        {"metavar": "N:M"},
        "keep N of every M consecutive weights of a row (2:4, 4:8), with --topup uniform",
    ),
    "format": (
        "dense",
        {},
        "how weights are saved: dense, ordinary safetensors with zeros; or packed, the non-zero values and bitmasks, which "
        "load with this package only",
    ),
}


def _add_config_flags(parser: argparse.ArgumentParser, without: Sequence[str] = ()) -> None:
    for field, (default, options, meaning) in CONFIG_FLAGS.items():
        if field in without:
            continue
        shown = "required" if default is None else f"default: {default}"
        flag = "--" + field.replace("_", "-")
        parser.add_argument(flag, default=argparse.SUPPRESS, help=f"{meaning} ({shown})", **options)


def _add_model_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="Hub id or directory of the model (required)")
    parser.add_argument("--revision", help="branch, tag or commit of the model on the Hub (default: main)")
    parser.add_argument(
        "--dtype",
        default="auto",
        help="float32, bfloat16 or float16; on a CPU float32 is often much faster (default: auto, the checkpoint's)",
    )
    parser.add_argument("--device", help="cpu, cuda, mps, ... (default: the accelerator if there is one, else cpu)")
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run code that comes with the model (default: no)"
    )


def _add_task_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tasks",
        nargs="+",
        default=[],
        help="zero-shot tasks of lm-eval, or 'paper' for the paper's seven; needs the extra [eval] (default: none)",
    )
    parser.add_argument("--limit", type=int, help="ask the first so many questions of each task (default: all)")
    parser.add_argument("--include-path", help="folder of further tasks in lm-eval's YAML format (default: none)")


def _config_fields(args: argparse.Namespace) -> dict[str, Any]:
    """The config's fields among the flags that were given."""
    from .registry import parse_method

    values = {field: value for field, value in vars(args).items() if field in CONFIG_FLAGS}
    for kind in ("saliency", "topup"):
        if isinstance(values.get(kind), str):
            values[kind], values[f"{kind}_args"] = parse_method(values[kind])
    return values


def _load_options(args: argparse.Namespace) -> dict[str, Any]:
    return {"dtype": args.dtype, "revision": args.revision or "main", "trust_remote_code": args.trust_remote_code}


def _device(args: argparse.Namespace):
    import torch

    from .offload import default_device

    return torch.device(args.device) if args.device else default_device()


@contextmanager
def _offload_folder(args: argparse.Namespace) -> Iterator[str | None]:
    """With --stream, a folder on the output's disk for weights that have to be rewritten; removed at the end."""
    if not args.stream:
        yield None
        return
    beside = _beside(args.output, "weights")
    beside.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{beside.name}.", dir=beside.parent) as folder:
        yield folder


def _beside(output: str, purpose: str) -> Path:
    """A hidden name on the same disk as the output directory."""
    path = Path(output).absolute()
    return path.parent / f".{path.name}.{purpose}"


class PruneCommand(Command):
    COMMAND = CommandInfo(name="prune", help="Prune a model and save it.")

    @staticmethod
    def parse_args(parser: argparse.ArgumentParser) -> None:
        _add_model_flags(parser)
        parser.add_argument("--output", help="directory to save the pruned model in, unless with --dry-run (required)")
        parser.add_argument(
            "--dry-run",
            action="store_true",
            help="only tell what would be pruned and what it would cost; reads no weights and no text (default: no)",
        )
        parser.add_argument("--push-to-hub", metavar="ID", help="publish the result as this repository (default: no)")
        parser.add_argument("--private", action="store_true", help="make that repository private (default: no)")
        parser.add_argument(
            "--evaluate",
            nargs="+",
            default=[],
            metavar="DATASET",
            help="test text: measure the perplexity before and after, for the report and the model card (default: none)",
        )
        parser.add_argument(
            "--work-dir",
            help="where finished steps are recorded, so that the same command goes on after a crash; removed at the end "
            "(default: hidden, beside the output)",
        )
        parser.add_argument(
            "--stream",
            action="store_true",
            help="leave the blocks' weights on disk and read them one block at a time, for models larger than memory "
            "(default: no)",
        )
        _add_config_flags(parser)

    def work(self) -> None:
        from .config import NeuronALConfig
        from .processes import process_group
        from .pruner import NeuronALPruner
        from .saving import check_directory

        args = self.args
        if args.output is None and not args.dry_run:
            raise ValueError("--output is missing: name a directory to save the pruned model in.")
        if args.output is not None:
            check_directory(args.output)
        config = NeuronALConfig(**_config_fields(args))
        if args.dry_run:
            from .dry_run import plan_prune

            write(f"\n{plan_prune(args.model, config, **_load_options(args), device=_device(args))}")
            return
        with process_group() as processes, _offload_folder(args) as folder:
            options = {**_load_options(args), "stream_to": folder, "device": _device(args)}
            pruner = NeuronALPruner.from_pretrained(args.model, config=config, **options)
            if folder is None:
                pruner.model.to(_device(args))
            work_dir = args.work_dir or _beside(args.output, "unfinished")
            model = pruner.quantize(args.output, work_dir=work_dir, evaluate=args.evaluate)
            if processes.rank > 0:
                return
            write(f"\n{pruner.report}\n\nSaved to {args.output}. It loads like any other model:")
            if config.format == "packed":
                write("    import optimum_neuronal  # to load the packed format")
            write(f'    AutoModelForCausalLM.from_pretrained("{args.output}")')
            if args.push_to_hub:
                write(f"Published: {pruner.push_to_hub(model, args.push_to_hub, private=args.private)}")

    def after_interrupt(self) -> str:
        work_dir = self.args.work_dir or (self.args.output and _beside(self.args.output, "unfinished"))
        if work_dir is None or not Path(work_dir).exists():
            return ""
        return f": the same command goes on from here; to begin anew, delete {work_dir}"


class EvaluateCommand(Command):
    COMMAND = CommandInfo(name="evaluate", help="Measure a model's perplexity.")

    @staticmethod
    def parse_args(parser: argparse.ArgumentParser) -> None:
        _add_model_flags(parser)
        parser.add_argument(
            "--dataset", nargs="+", default=["wikitext2"], help=f"test text: {DATASETS} (default: wikitext2)"
        )
        parser.add_argument(
            "--seq-length", type=int, help="tokens per window (default: the smaller of 2048 and what the model admits)"
        )
        parser.add_argument("--max-windows", type=int, help="measure on the first so many windows (default: all)")
        parser.add_argument("--batch-size", type=int, default=1, help="windows per forward (default: 1)")
        _add_task_flags(parser)

    def work(self) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from .evaluation import evaluate_perplexity
        from .report import format_table

        args, options = self.args, _load_options(self.args)
        if args.tasks:
            from .tasks import check_tasks

            check_tasks(args.tasks, args.include_path)
        model = AutoModelForCausalLM.from_pretrained(args.model, **options).to(_device(args))
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
            from .tasks import evaluate_tasks

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
    OWN = ("sparsity", "saliency", "topup", "dataset", "format", "pattern")

    @classmethod
    def parse_args(cls, parser: argparse.ArgumentParser) -> None:
        _add_model_flags(parser)
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
            "--sparsity", **several, type=float, help="shares of weights to set to zero (default: 0.6 0.7 0.8)"
        )
        parser.add_argument("--dataset", default="c4", help=f"calibration text: {DATASETS} (default: c4)")
        parser.add_argument(
            "--evaluate", nargs="+", default=["wikitext2"], help="test text, of the same kinds (default: wikitext2)"
        )
        parser.add_argument("--max-windows", type=int, help="measure on the first so many windows (default: all)")
        _add_task_flags(parser)
        parser.add_argument(
            "--output",
            default="comparison",
            help="directory for tables and finished combinations; a second run goes on there (default: comparison)",
        )
        parser.add_argument(
            "--overwrite", action="store_true", help="run again what is finished in that directory (default: no)"
        )
        parser.add_argument(
            "--plots", action="store_true", help="draw the figures too; needs the extra [report] (default: no)"
        )
        _add_config_flags(parser, without=cls.OWN)

    def work(self) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from .comparing import compare

        args = self.args
        if args.plots:
            from .plots import check_matplotlib

            check_matplotlib()
        options = _load_options(args)
        model = AutoModelForCausalLM.from_pretrained(args.model, **options).to(_device(args))
        options.pop("dtype")
        tokenizer = AutoTokenizer.from_pretrained(args.model, **options)
        lists = {"saliency": "saliencies", "topup": "topups", "sparsity": "sparsities"}
        chosen = {plural: getattr(args, name) for name, plural in lists.items() if hasattr(args, name)}
        others = {field: value for field, value in vars(args).items() if field in CONFIG_FLAGS.keys() - {*self.OWN}}
        comparison = compare(
            model,
            tokenizer,
            **chosen,
            dataset=args.dataset,
            evaluate=args.evaluate,
            tasks=args.tasks,
            limit=args.limit,
            include_path=args.include_path,
            max_windows=args.max_windows,
            output=args.output,
            overwrite=args.overwrite,
            **others,
        )
        write(f"\n{comparison}\n\nSaved in {args.output}: comparison.md, .csv and .json")
        if args.plots:
            from .plots import plot_comparison

            write(", ".join(path.name for path in plot_comparison(comparison, args.output)))
        if comparison.failed:
            sys.exit(
                f"compare: {len(comparison.failed)} of {len(comparison.results)} combinations failed, see the table"
            )

    def after_interrupt(self) -> str:
        return f": the same command goes on from what is finished in {self.args.output}"


class DemoCommand(Command):
    COMMAND = CommandInfo(name="demo", help="Prune the small model that comes with the package; two minutes.")

    @staticmethod
    def parse_args(parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--output", default="demo-model", help="directory to save the 70%% sparse model in (default: demo-model)"
        )

    def work(self) -> None:
        from .demo import run_demo

        run_demo(self.args.output, write)


class NeuronalCommand(BaseOptimumCLICommand):
    COMMAND = CommandInfo(name="neuronal", help="Sparse language models without retraining (NeuronAL).")
    SUBCOMMANDS = tuple(
        CommandInfo(name=command.COMMAND.name, help=command.COMMAND.help, subcommand_class=command)
        for command in (PruneCommand, EvaluateCommand, CompareCommand, InspectCommand, ConvertCommand, DemoCommand)
    )
