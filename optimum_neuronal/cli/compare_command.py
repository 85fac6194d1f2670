"""`optimum-cli neuronal compare`, which prunes a model in many ways and measures each."""

import argparse
import sys
from pathlib import Path
from typing import Any

from ..common.figure_style import check_matplotlib
from ..common.registry import format_method
from ..comparing.combinations import find_combinations
from ..comparing.comparing import compare
from ..comparing.comparison import check_tables_directory
from ..comparing.experiments import EXPERIMENTS, experiment
from ..comparing.means import merge
from ..config.config_fields import DATASETS
from ..config.neuronal_config import read_config_file
from ..config.presets import PRESETS
from ..model.load_model import check_unquantized
from . import flags
from .command import Command, write


# Fields of the config that take several values -> the argument of `compare`, and its default in words.
SEVERAL = {
    "sparsity": ("sparsities", "0.6 0.7 0.8"),
    "saliency": ("saliencies", "wanda"),
    "topup": ("topups", "uniform owl neuronal"),
}
SWEPT = {"seed": "0", "dataset": "c4", "num_alignment_samples": "8"}  # several values: means over them
WITHOUT = ("pattern",)  # fields that a comparison does not have
OTHERS = ("evaluate", "presets", "window", "max_windows", "tasks", "limit", "include_path")
WAYS = (*dict(SEVERAL.values()), "presets", "without", "sweep", "dataset")  # arguments of `find_combinations`


class CompareCommand(Command):
    NAME = "compare"
    HELP = "Prune a model in many ways and compare what each loses."
    USAGE = "{--model MODEL,--merge DIR...} [flags]"
    EXAMPLES = (
        "--model Qwen/Qwen3-0.6B --sparsity 0.6 0.7 --topup uniform owl neuronal --plots",
        "--model Qwen/Qwen3-0.6B --preset paper --output qwen-paper --plots",
        "--model Qwen/Qwen3-0.6B --topup neuronal --sparsity 0.7 --seed 0 16 46",
        "--model Qwen/Qwen3-0.6B --sparsity 0.7 --config-presets paper best",
        "--merge qwen-paper llama-paper --output means",
    )

    @staticmethod
    def add_flags(parser: argparse.ArgumentParser) -> None:
        preset = "experiment from the paper; other flags override its arguments (default: none)"
        parser.add_argument("--preset", choices=sorted(EXPERIMENTS), help=preset)
        config = "JSON file of config fields for all combinations, which flags override (default: none)"
        parser.add_argument("--config", metavar="FILE", help=config)
        merge = "only show means over finished comparisons of several models (default: none)"
        parser.add_argument("--merge", nargs="+", metavar="DIR", help=merge)
        flags.add_model_flags(parser, required=False)
        parser.add_argument("--evaluate", nargs="*", help=f"test text: {DATASETS} (default: wikitext2)")
        flags.add_test_flags(parser)
        presets = "presets of the config to compare with, at every sparsity or at their own amount (default: none)"
        parser.add_argument("--config-presets", dest="presets", nargs="+", choices=sorted(PRESETS), help=presets)
        output = "directory for tables and results; a second run resumes from them (default: comparison)"
        parser.add_argument("--output", default="comparison", help=output)
        flags.add_switch(parser, "--overwrite", "rerun everything, and replace tables that no comparison wrote")
        flags.add_switch(parser, "--plots", "draw figures too; needs the extra [report]")
        flags.add_import_flag(parser)
        flags.add_memory_flags(parser)
        several = {name: default for name, (_, default) in SEVERAL.items()} | SWEPT
        flags.add_config_flags(parser, (name for name in flags.CONFIG_FLAGS if name not in WITHOUT), several)

    def check(self) -> None:
        if self.args.model is self.args.merge is None:
            raise ValueError("--model is missing: give it, or --merge.")
        for flag in ("model", "plots", "overwrite"):
            if self.args.merge and getattr(self.args, flag):
                raise ValueError(f"--{flag} and --merge cannot be combined: leave one of them out.")
        if self.args.plots:
            check_matplotlib()
        flags.import_modules(self.args.modules)

    def work(self) -> None:
        args = self.args
        if args.merge:
            write(f"\n{merge(args.merge, args.output)}\n\nSaved in {args.output}: means.md")
            return
        given, device = self._arguments(), flags.device_of(args)
        flags.memory_of(args)
        check_tables_directory(args.output, args.overwrite)
        ways = {key: given[key] for key in WAYS if key in given}
        others = {key: given[key] for key in given.keys() & flags.CONFIG_FLAGS.keys() - ways.keys()}
        find_combinations(**ways, config=others)  # raises before the model is loaded
        options = {name: getattr(args, name) for name in ("output", "overwrite", "batch_size", "max_hidden_bytes")}
        source = flags.source_of(args)
        check_unquantized(source, {})
        with flags.loaded(args, source, device, Path(args.output)) as (model, tokenizer):
            comparison = compare(model, tokenizer, **given, **options)
        write(f"\n{comparison}\n\nSaved in {args.output}: comparison.md and .json")
        if args.plots:
            write(", ".join(path.name for path in comparison.plot(args.output)))
        if comparison.failed:
            counts = f"{len(comparison.failed)} of {len(comparison.results)}"
            sys.exit(f"compare: {counts} combinations failed, see the table")

    def _arguments(self) -> dict[str, Any]:
        """Return the arguments of `compare`: of the experiment, replaced by the file, replaced by flags."""
        preset = EXPERIMENTS.get(self.args.preset, {})
        given: dict[str, Any] = {} if self.args.config is None else _in_file(self.args.config)
        sweep = {name: values for name, values in preset.get("sweep", {}).items() if name not in given}
        for name, value in flags.given_fields(self.args).items():
            if name in SWEPT:
                sweep.pop(name, None)
                if len(value) > 1:
                    sweep[name] = value
                    continue
                (value,) = value
            given[SEVERAL[name][0] if name in SEVERAL else name] = value
        given |= {name: value for name in OTHERS if (value := getattr(self.args, name)) is not None}
        given["sweep"] = sweep
        return experiment(self.args.preset, **given) if preset else given

    def after_interrupt(self) -> str:
        return f": the same command resumes from what is finished in {self.args.output}"


def _in_file(path: str) -> dict[str, Any]:
    """Return the fields in a config's file as arguments of `compare`: methods with their hyperparameters in one text."""
    values = read_config_file(path)
    values.pop("quant_method", None)
    for name in ("saliency", "topup"):
        if name in values:  # otherwise they are for the methods of the flags
            values[name] = format_method(values[name], values.pop(f"{name}_args", {}))
    return {
        SEVERAL[name][0] if name in SEVERAL else name: [value] if name in SEVERAL else value
        for name, value in values.items()
    }
