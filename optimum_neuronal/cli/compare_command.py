"""`optimum-cli neuronal compare`, which prunes a model in many ways and measures each."""

import argparse
import sys

from optimum.commands.base import CommandInfo

from ..config.config_fields import DATASETS
from ..config.presets import PRESETS
from .command import Command, write
from .flags import (
    CONFIG_FLAGS,
    add_config_flags,
    add_memory_flags,
    add_model_flags,
    add_switch,
    add_test_flags,
    device_of,
    given_fields,
    load,
)


# Fields of the config that take several values -> the argument of `compare`, and its default in words.
SEVERAL = {
    "sparsity": ("sparsities", "0.6 0.7 0.8"),
    "saliency": ("saliencies", "wanda"),
    "topup": ("topups", "uniform neuronal search"),
    "bits_per_weight": ("bits_per_weight", "none"),
}
WITHOUT = ("pattern", "embedding_bits")  # fields that a comparison does not have


class CompareCommand(Command):
    COMMAND = CommandInfo(name="compare", help="Prune a model in many ways and compare what each loses.")
    USAGE = "--model MODEL [flags]"
    EXAMPLES = (
        "--model Qwen/Qwen3-0.6B --sparsity 0.6 0.7 --topup uniform owl search --plots",
        "--model Qwen/Qwen3-0.6B --saliency wanda alps --dataset my-text.txt --evaluate my-test.txt",
        "--model Qwen/Qwen3-0.6B --sparsity 0.5 0.6 --topup search --bits-per-weight 2.4 3 --plots",
        "--model Qwen/Qwen3-0.6B --sparsity 0.7 --presets paper best --output presets",
    )

    @classmethod
    def parse_args(cls, parser: argparse.ArgumentParser) -> None:
        add_model_flags(parser)
        parser.add_argument("--evaluate", nargs="+", help=f"test text: {DATASETS} (default: wikitext2)")
        add_test_flags(parser)
        presets = "presets of the config to measure too, at every sparsity (default: none)"
        parser.add_argument("--presets", nargs="+", choices=sorted(PRESETS), help=presets)
        output = "directory for tables and results; a second run resumes from them (default: comparison)"
        parser.add_argument("--output", default="comparison", help=output)
        add_switch(parser, "--overwrite", "run finished combinations again, and replace files of others")
        add_switch(parser, "--plots", "draw figures too; needs the extra [report]")
        add_memory_flags(parser)
        several = {name: default for name, (_, default) in SEVERAL.items()}
        add_config_flags(parser, (name for name in CONFIG_FLAGS if name not in WITHOUT), several)

    def check(self) -> None:
        if self.args.plots:
            from ..common.figure_style import check_matplotlib

            check_matplotlib()

    def work(self) -> None:
        from ..comparing.combinations import find_combinations
        from ..comparing.comparing import compare
        from ..comparing.comparison import check_output

        args, device = self.args, device_of(self.args)
        given = {SEVERAL[name][0] if name in SEVERAL else name: value for name, value in given_fields(args).items()}
        for name in ("evaluate", "presets", "max_windows", "tasks", "limit", "include_path"):
            if getattr(args, name):
                given[name] = getattr(args, name)
        check_output(args.output, args.overwrite)
        ways = {key: given[key] for key in (*dict(SEVERAL.values()), "presets", "dataset") if key in given}
        others = {key: given[key] for key in given.keys() & CONFIG_FLAGS.keys() - ways.keys()}
        find_combinations(**ways, config=others)  # raises before the model is loaded
        options = {name: getattr(args, name) for name in ("output", "overwrite", "batch_size", "max_hidden_bytes")}
        found = compare(*load(args, device), **given, **options)
        write(f"\n{found}\n\nSaved in {args.output}: comparison.md, .csv and .json")
        if args.plots:
            write(", ".join(path.name for path in found.plot(args.output)))
        if found.failed:
            sys.exit(f"compare: {len(found.failed)} of {len(found.results)} combinations failed, see the table")

    def after_interrupt(self) -> str:
        return f": the same command resumes from what is finished in {self.args.output}"
