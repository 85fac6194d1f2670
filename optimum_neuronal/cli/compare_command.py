"""`optimum-cli neuronal compare`, which prunes a model in many ways and measures each."""

import argparse
import sys
from pathlib import Path
from typing import Any

from ..common.registry import format_method
from ..common.validation import require_extra
from ..comparing.compare import run_study
from ..comparing.comparison import merge
from ..comparing.experiments import EXPERIMENTS, experiment
from ..comparing.figures import check_lines
from ..comparing.study import LISTS, Study
from ..config.config_fields import DATASETS
from ..config.neuronal_config import read_config_file
from ..config.presets import PRESETS
from ..model.load_model import check_unquantized
from . import flags
from .command import Command, write


# Fields of the config that take several values -> their default in words.
SEVERAL = {"sparsity": "0.6 0.7 0.8", "saliency": "wanda", "topup": "uniform owl neuronal"}
SWEPT = {"seed": "0", "dataset": "c4", "num_alignment_samples": "8"}  # several values: means over them
OTHERS = ("evaluate", "presets", "without", "window", "max_windows", "tasks", "limit", "include_path")


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
        without = "pairs of saliency and top-up to leave out, such as sparsegpt+dsnot (default: none)"
        parser.add_argument("--without", nargs="+", metavar="PAIR", help=without)
        output = "directory for tables and results; a second run resumes from them (default: comparison)"
        parser.add_argument("--output", default="comparison", help=output)
        overwrite = "rerun everything, and replace tables of another model or that no comparison wrote"
        flags.add_switch(parser, "--overwrite", overwrite)
        keep = "directory in which to save every pruned model (default: none is saved)"
        parser.add_argument("--keep", metavar="DIR", help=keep)
        plots = (
            "draw figures too, with at most eight lines each: those named, such as wanda+owl, and the best; needs the extra "
            "[report] (default: no figures)"
        )
        parser.add_argument("--plots", metavar="LINE", nargs="*", help=plots)
        flags.add_import_flag(parser)
        flags.add_memory_flags(parser)
        flags.add_config_flags(parser, (name for name in flags.CONFIG_FLAGS if name != "pattern"), SEVERAL | SWEPT)

    def check(self) -> None:
        if self.args.model is self.args.merge is None:
            raise ValueError("--model is missing: give it, or --merge.")
        if self.args.merge and self.given - {"merge", "output", "quiet", "debug"}:
            raise ValueError("--merge prunes nothing and takes --output alone: leave the other flags out.")
        if self.args.plots is not None:
            require_extra("matplotlib", "report")
        flags.import_modules(self.args.modules)

    def work(self) -> None:
        args = self.args
        if args.merge:
            write(f"\n{merge(args.merge, args.output)}\n\nSaved in {args.output}: means.md")
            return
        memory, source = flags.memory_of(args), flags.source_of(args)
        study = Study.of({**self._arguments(), "output": args.output, "overwrite": args.overwrite, "keep": args.keep})
        check_lines(args.plots or (), [one.result for one in study.combinations])
        check_unquantized(source)
        needed = {one.dataset for one in study.combinations if one.config.methods.needs_calibration}
        tests = study.test_sets.values()
        with flags.loaded(args, source, Path(args.output), [*needed], tests) as (model, tokenizer):
            comparison = run_study(study, model, tokenizer, memory)
        write(f"\n{comparison}\n\nSaved in {args.output}: comparison.md, .tex and .json")
        if args.plots is not None:
            write(", ".join(path.name for path in comparison.plot(args.output, args.plots)))
        if comparison.failed:
            counts = f"{len(comparison.failed)} of {len(comparison.results)}"
            sys.exit(f"compare: {counts} combinations failed, see the table")

    def _arguments(self) -> dict[str, Any]:
        """Return the arguments of `compare`: the experiment's, replaced by the file's, replaced by flags."""
        preset = EXPERIMENTS.get(self.args.preset, {})
        given = {} if self.args.config is None else _read_arguments(self.args.config)
        sweep = {name: values for name, values in preset.get("sweep", {}).items() if name not in given}
        for name, value in flags.given_fields(self.args).items():
            if name not in SWEPT:
                given[LISTS.get(name, name)] = value
            elif len(value) > 1:
                sweep[name] = value
            else:
                sweep.pop(name, None)
                given[name] = value[0]
        if isinstance(given.get("dataset"), list) and "dataset" not in sweep:  # in the file
            raise ValueError(
                "compare calibrates on one dataset at a time: name it with --dataset, or several for means."
            )
        given |= {name: value for name in OTHERS if (value := getattr(self.args, name)) is not None}
        given["sweep"] = sweep
        return experiment(self.args.preset, **given) if preset else given

    def unfinished(self) -> str | Path | None:
        return self.args.output


def _read_arguments(path: str) -> dict[str, Any]:
    """Return the fields in a config's file as arguments of `compare`: methods with their hyperparameters in one text."""
    values = read_config_file(path)
    values.pop("quant_method", None)
    for name in ("saliency", "topup"):
        if name in values:  # otherwise they are for the methods of the flags
            values[name] = format_method(values[name], values.pop(f"{name}_args", {}))
    return {LISTS.get(name, name): [value] if name in LISTS else value for name, value in values.items()}
