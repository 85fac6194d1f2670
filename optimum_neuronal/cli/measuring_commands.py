"""`optimum-cli neuronal compare`, which measures the loss of many prunes."""

import argparse
import sys
from dataclasses import fields
from typing import TYPE_CHECKING

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


if TYPE_CHECKING:
    from ..comparing.settings import ComparisonSettings


class CompareCommand(Command):
    """Command that prunes a model in many ways, and measures each."""

    COMMAND = CommandInfo(name="compare", help="Prune a model in many ways and compare what each loses.")
    USAGE = "--model MODEL [flags]"
    EXAMPLES = (
        "--model Qwen/Qwen3-0.6B --sparsity 0.6 0.7 --topup uniform owl search --plots",
        "--model Qwen/Qwen3-0.6B --saliency wanda alps --dataset my-text.txt --evaluate my-test.txt",
        "--model Qwen/Qwen3-0.6B --sparsity 0.5 0.6 --topup search --bits-per-weight 2.4 3 --plots",
        "--model Qwen/Qwen3-0.6B --preset evidence --output evidence",
    )
    WITHOUT = {"pattern", "embedding_bits"}  # fields that combinations cannot have
    # Fields that take several values -> their default in words.
    SEVERAL = {
        "sparsity": "0.6 0.7 0.8",
        "saliency": "wanda",
        "topup": "uniform neuronal search",
        "bits_per_weight": "none",
    }

    @classmethod
    def parse_args(cls, parser: argparse.ArgumentParser) -> None:
        add_model_flags(parser)
        parser.add_argument("--evaluate", nargs="+", help=f"test text: {DATASETS} (default: wikitext2)")
        add_test_flags(parser)
        protocol = "the published protocol for what no flag says, and evidence.md to send in (default: none)"
        presets = (
            f"presets to measure too: {', '.join(PRESETS)}; each chooses its methods, and is run at every sparsity; "
        )
        presets += "without a value none (default: none; with --preset default)"
        parser.add_argument("--presets", nargs="*", metavar="PRESET", help=presets)
        parser.add_argument("--preset", choices=["evidence"], help=protocol)
        parser.add_argument(
            "--output",
            default="comparison",
            help="directory for tables and finished combinations; a second run goes on there (default: comparison)",
        )
        again = "run again what is finished in that directory, and replace files there that no comparison wrote"
        add_switch(parser, "--overwrite", again)
        add_switch(parser, "--plots", "draw the figures too; needs the extra [report]")
        add_memory_flags(parser)
        add_config_flags(parser, (name for name in CONFIG_FLAGS if name not in cls.WITHOUT), cls.SEVERAL)

    def work(self) -> None:
        from ..comparing import evidence
        from ..comparing.comparing import Measurements

        args, device = self.args, device_of(self.args)
        settings = self._check()
        comparison = Measurements(*load(args, device), settings).compare(args.output, args.overwrite)
        write(f"\n{comparison}\n\nSaved in {args.output}: comparison.md, .csv and .json")
        if args.preset:
            write(f"{evidence.write_page(comparison, args.output)} is the page to send in: CONTRIBUTING.md says how.")
        if args.plots:
            write(", ".join(path.name for path in comparison.plot(args.output, args.overwrite).paths))
        if comparison.failed:
            failed = f"{len(comparison.failed)} of {len(comparison.results)} combinations failed"
            sys.exit(f"compare: {failed}, see the table")

    def _check(self) -> "ComparisonSettings":
        """Return the settings, checked before the model is loaded."""
        from ..comparing.comparison import FIGURES, TABLES, check_output
        from ..comparing.evidence import PAGE, PRESETS
        from ..comparing.settings import ComparisonSettings

        args = self.args
        written = [*TABLES, *(FIGURES if args.plots else ()), *([PAGE] if args.preset else ())]
        check_output(args.output, args.overwrite, written)
        config = given_fields(args)
        plurals = {"sparsity": "sparsities", "saliency": "saliencies", "topup": "topups"}
        own = {plurals.get(name, name): config.pop(name) for name in ("dataset", *self.SEVERAL) if name in config}
        own |= {"evaluate": args.evaluate} if args.evaluate else {}
        own |= {} if args.presets is None else {"presets": args.presets}
        for name in ("max_windows", "tasks", "limit", "include_path", "batch_size", "max_hidden_bytes"):
            own[name] = getattr(args, name)
        settings = {**PRESETS.get(args.preset, {}), **own, **config}
        of_comparison = {entry.name for entry in fields(ComparisonSettings)}
        config = {name: settings.pop(name) for name in settings.keys() - of_comparison}
        return ComparisonSettings(**settings, config=config)

    def after_interrupt(self) -> str:
        return f": the same command goes on from what is finished in {self.args.output}"
