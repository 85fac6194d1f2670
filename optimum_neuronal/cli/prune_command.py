"""`optimum-cli neuronal prune`, from a dense model to a saved sparse one."""

import argparse
import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optimum.commands.base import CommandInfo

from ..common.validation import check_embedding_bits
from ..config.presets import PRESETS
from .command import Command, write
from .flags import (
    CONFIG_FLAGS,
    add_config_flags,
    add_memory_flags,
    add_model_flags,
    add_overwrite_flag,
    add_switch,
    device_of,
    given_fields,
    load_options,
)


if TYPE_CHECKING:
    import torch

    from ..config.neuronal_config import NeuronALConfig
    from ..data.calibration import CalibrationSet


NO_SPARSITY = (
    "--sparsity is missing: give a share of the weights to set to zero, such as 0.7; or --bits-per-weight, such as 2.4, to "
    "quantise them; or a --preset or --config that has one."
)


GROUPS = ("model", "result", "how much", "methods", "calibration text", "rarely needed")
# Fields of the config in these groups; all others are rarely needed.
AMOUNT = ("sparsity", "bits_per_weight", "embedding_bits", "pattern")
METHOD = ("saliency", "topup", "refit_epochs")
TEXT = ("dataset", "num_samples", "seq_length", "seed")


class PruneCommand(Command):
    """Command that prunes a model, or with `--dry-run` says what that costs."""

    COMMAND = CommandInfo(
        name="prune",
        help="Set most weights of a model's linear projections to zero, or quantise them, so that it loses little, and save it.",
    )
    USAGE = "--model MODEL {--sparsity SHARE,--bits-per-weight BITS} --output DIR [flags]"
    EXAMPLES = (
        "--model Qwen/Qwen3-0.6B --sparsity 0.7 --output qwen-sparse --evaluate wikitext2",
        "--model Qwen/Qwen3-0.6B --bits-per-weight 2.4 --output qwen-2.4",
        "--model Qwen/Qwen3-0.6B --sparsity 0.7 --dry-run",
    )

    @staticmethod
    def parse_args(parser: argparse.ArgumentParser) -> None:
        main, result, amount, method, text, rare = map(parser.add_argument_group, GROUPS)
        add_model_flags(main, rare)
        dry = "only show what would be pruned and what it would cost; all is checked that needs no weight and no download"
        add_switch(main, "--dry-run", dry)
        main.add_argument(
            "--config",
            metavar="FILE",
            help="fields of the config, which flags override: a .json file, or the config.json of a pruned model, whose prune "
            "is repeated (default: none)",
        )
        main.add_argument(
            "--preset", choices=PRESETS, help="named fields of the config, which --config and flags override (default: none)"
        )
        result.add_argument("--output", help="directory to save the pruned model in, unless with --dry-run (required)")
        add_overwrite_flag(result)
        result.add_argument(
            "--format",
            choices=("dense", "packed"),
            help="dense, ordinary safetensors; or packed, the non-zero values and bitmasks, or the codes and scales, which load "
            "with this package only (default: packed if weights are quantised, else dense)",
        )
        result.add_argument(
            "--evaluate",
            nargs="+",
            default=[],
            metavar="DATASET",
            help="test text: measure the perplexity before and after, for the report and the model card (default: none)",
        )
        result.add_argument("--push-to-hub", metavar="ID", help="publish the result as this repository (default: no)")
        add_switch(result, "--private", "make that repository private")
        for group, names in ((amount, AMOUNT), (method, METHOD), (text, TEXT)):
            add_config_flags(group, names)
        add_config_flags(rare, (name for name in CONFIG_FLAGS if name not in (*AMOUNT, *METHOD, *TEXT)))
        rare.add_argument(
            "--work-dir",
            help="where finished steps are recorded, so that the same command goes on after a crash; removed at the end "
            "(default: hidden, beside the output)",
        )
        add_switch(rare, "--stream", "read weights from disk one block at a time, for models larger than memory")
        add_memory_flags(rare)

    def check(self) -> None:
        if self.args.config is self.args.preset is None and not {"sparsity", "bits_per_weight"} & vars(self.args).keys():
            raise ValueError(NO_SPARSITY)
        if self.args.output is None and not self.args.dry_run:
            raise ValueError("--output is missing: name a directory to save the pruned model in.")
        super().check()

    def work(self) -> None:
        from ..config.neuronal_config import NeuronALConfig, read_config_file
        from ..pruning.context import check_memory

        args = self.args
        given = given_fields(args)
        recipe = (PRESETS[args.preset] if args.preset else {}) | (read_config_file(args.config) if args.config else {})
        if not {"sparsity", "bits_per_weight"} & (recipe | given).keys():
            raise ValueError(NO_SPARSITY)
        self._check_places()
        config, device = NeuronALConfig.from_dict(recipe, **given), device_of(args)
        args.format = args.format or config.default_format
        check_embedding_bits(config.embedding_bits, args.format)
        check_memory(args.batch_size, args.max_hidden_bytes)
        if args.stream and config.bits_per_weight is not None:
            raise ValueError("--bits-per-weight needs the weights in memory: leave --stream out.")
        if args.dry_run:
            self._plan(config, device)
        else:
            self._prune(config, device)

    def _check_places(self) -> None:
        """Raise if the result may not be written, on this machine or on the Hub."""
        from ..checkpoint.hub import check_push
        from ..checkpoint.own_files import check_output
        from ..files.directories import check_apart, check_writable

        args = self.args
        if args.output is not None:
            check_output(args.output, args.overwrite, args.model)
            check_writable(self._work_dir, "record in --work-dir")
            check_apart(self._work_dir, args.output)
        if args.push_to_hub:
            check_push(args.push_to_hub)

    def _plan(self, config: "NeuronALConfig", device: "torch.device") -> None:
        """Write what a prune would do and cost."""
        from ..pruning.context import check_texts
        from ..pruning.dry_run import plan_prune

        options = {**load_options(self.args), "device": device, "batch_size": self.args.batch_size}
        plan = plan_prune(self.args.model, config, **options)
        check_texts(config, self.args.evaluate)
        write(f"\n{plan}")

    def _prune(self, config: "NeuronALConfig", device: "torch.device") -> None:
        """Prune the model, save it, and write the report."""
        from ..common.processes import process_group
        from ..files.scratch import scratch_directory
        from ..model.load_model import loading_code
        from ..pruner import NeuronALPruner

        args = self.args
        tokenizer, calibration, tests = self._read(config)
        with process_group() as processes, ExitStack() as stack:
            folder = None
            if args.stream:  # for weights that have to be rewritten, on the output's disk
                beside = self._beside("weights")
                beside.parent.mkdir(parents=True, exist_ok=True)
                folder = str(stack.enter_context(scratch_directory(beside.parent, f"{beside.name}-{processes.rank}")))
            options = {**load_options(args), "tokenizer": tokenizer, "stream_to": folder, "device": device}
            pruner = NeuronALPruner.from_pretrained(args.model, config=config, **options)
            if folder is None:
                pruner.model.to(device)
            model = pruner.quantize(
                args.output,
                dataset=calibration,
                work_dir=self._work_dir,
                evaluate=tests,
                format=args.format,
                batch_size=args.batch_size,
                max_hidden_bytes=args.max_hidden_bytes,
            )
            if processes.rank > 0:
                return
            write(f"\n{pruner.report}\n\nSaved to {args.output}. It loads like any other model:")
            if args.format == "packed":
                write("    import optimum_neuronal  # to load the packed format")
            write(f"    {loading_code(model).of(args.output)}")
            if args.push_to_hub:
                write(f"Published: {pruner.push_to_hub(model, args.push_to_hub, private=args.private)}")

    def _read(self, config: "NeuronALConfig") -> tuple[Any, "CalibrationSet | None", dict[str, "torch.Tensor"]]:
        """Return tokenizer, calibration sequences and test windows, with their errors before weights are loaded."""
        from ..evaluation.perplexity import load_windows, name_test_sets
        from ..pruner import NeuronALPruner
        from ..pruning.calibrating import find_tokenizer
        from ..pruning.context import check_unloaded

        options = load_options(self.args)
        model = check_unloaded(self.args.model, config, **options).model
        del options["dtype"]
        tokenizer, tests = find_tokenizer(self.args.model, **options), name_test_sets(self.args.evaluate)
        windows = {name: load_windows(model.config, tokenizer, test) for name, test in tests.items()}
        calibration = NeuronALPruner(config, tokenizer).draw_calibration(model, revision=options["revision"])
        return tokenizer, calibration, windows

    @property
    def _work_dir(self) -> str | Path:
        return self._beside("unfinished") if self.args.work_dir is None else self.args.work_dir

    def _beside(self, purpose: str) -> Path:
        """Return a hidden name on the same disk as the output directory."""
        path = Path(os.path.abspath(self.args.output))
        return path.parent / f".{path.name}.{purpose}"

    def after_interrupt(self) -> str:
        if not self.args.output or not Path(self._work_dir).exists():
            return ""
        return f": the same command goes on from here; to begin anew, delete {self._work_dir}"
