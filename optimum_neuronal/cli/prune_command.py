"""`optimum-cli neuronal prune`, from a dense model to a saved sparse one."""

import argparse
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.hub import check_push
from ..common.processes import process_group
from ..common.validation import check_count
from ..config.neuronal_config import NeuronALConfig, read_config_file
from ..config.presets import PRESETS, replace_fields
from ..data.documents import check_datasets
from ..evaluation.answers import answer
from ..evaluation.perplexity import load_windows
from ..files.directories import is_same
from ..files.output import check_output
from ..files.records import hidden_directory
from ..model.load_model import checkpoint_dtype
from ..pruner import NeuronALPruner
from ..pruning.dry_run import dry_run
from . import flags
from .command import Command, write, write_saved


GROUPS = ("model", "result", "how much", "methods", "calibration text", "rarely needed")
# Fields of the config in these groups. All others are rarely needed.
AMOUNT = ("sparsity", "pattern")
METHOD = ("saliency", "topup", "refit_epochs")
TEXT = ("dataset", "num_samples", "seq_length", "seed")


class PruneCommand(Command):
    NAME = "prune"
    HELP = "Set weights of a model's projections to zero."
    USAGE = "--model MODEL --sparsity SHARE --output DIR [flags]"
    EXAMPLES = (
        "--model Qwen/Qwen3-0.6B --sparsity 0.7 --output qwen-sparse --evaluate wikitext2",
        "--model Qwen/Qwen3-0.6B --preset paper --sparsity 0.6 --output qwen-paper",
        "--model Qwen/Qwen3-0.6B --sparsity 0.7 --dry-run",
    )

    @staticmethod
    def add_flags(parser: argparse.ArgumentParser) -> None:
        main, result, amount, method, text, rare = map(parser.add_argument_group, GROUPS)
        flags.add_model_flags(main, rare)
        flags.add_switch(main, "--dry-run", "only show what would be pruned, sizes and memory, and time one block")
        preset = "fields of the config under one name, which --config and flags override (default: none)"
        main.add_argument("--preset", choices=sorted(PRESETS), help=preset)
        config = "JSON file of config fields, or config.json or neuronal_report.json of a pruned model (default: none)"
        main.add_argument("--config", metavar="FILE", help=config)
        result.add_argument("--output", help="directory to save the pruned model in (required without --dry-run)")
        flags.add_overwrite_flag(result)
        format = "packed: small, loads with this package (default: dense)"
        result.add_argument("--format", choices=("dense", "packed"), help=format)
        dtype = "dtype of the saved weights (default: the checkpoint's, whatever --dtype says)"
        result.add_argument("--save-dtype", choices=flags.DTYPES, help=dtype)
        evaluate = "test text: measure perplexity before and after (default: a little unused calibration text)"
        result.add_argument("--evaluate", nargs="+", default=[], metavar="DATASET", help=evaluate)
        result.add_argument(
            "--sample", metavar="PROMPT", help="show the model's answer before and after (default: no)"
        )
        flags.add_window_flag(result)
        result.add_argument(
            "--push-to-hub",
            metavar="ID",
            help="publish the result as this repository; --overwrite replaces a dense model there (default: no)",
        )
        flags.add_switch(result, "--private", "make that repository private")
        for group, names in ((amount, AMOUNT), (method, METHOD), (text, TEXT)):
            flags.add_config_flags(group, names)
        flags.add_config_flags(rare, (name for name in flags.CONFIG_FLAGS if name not in (*AMOUNT, *METHOD, *TEXT)))
        work_dir = "records of finished steps, which the same command resumes (default: hidden, next to the output)"
        rare.add_argument("--work-dir", help=work_dir)
        flags.add_import_flag(rare)
        flags.add_memory_flags(rare)

    def check(self) -> None:
        args = self.args
        if args.config is args.preset is None and "sparsity" not in vars(args):
            raise ValueError("--sparsity is missing: give it, or a preset or config that has one.")
        if args.output is None and not args.dry_run:
            raise ValueError("--output is missing: name a directory to save the pruned model in.")
        if args.batch_size is not None:
            check_count("--batch-size", args.batch_size, 1)
        flags.import_modules(args.modules)

    def work(self) -> None:
        args, config = self.args, self.config()
        if args.output is not None:
            check_output(args.output, args.overwrite, [args.model])
            if args.work_dir and is_same(args.work_dir, args.output):
                raise ValueError("--work-dir is the output directory: name another one, or leave it out.")
        if args.dry_run:
            self._dry_run(config)
        else:
            self._prune(config)

    def _dry_run(self, config: NeuronALConfig) -> None:
        args, options = self.args, flags.load_options(self.args)
        run = dry_run(args.model, config, flags.device_of(args), **options)
        tokenizer = flags.tokenizer_of(args, options)
        for test in args.evaluate:
            load_windows(run.decoder.model.config, tokenizer, test, args.window, add_bos=config.add_bos)
        write(f"\n{run}")

    def config(self) -> NeuronALConfig:
        """Return the config: of the preset, overridden by the file, overridden by flags."""
        fields: dict[str, Any] = PRESETS.get(self.args.preset, {})
        in_file = {} if self.args.config is None else read_config_file(self.args.config)
        for given in (in_file, flags.given_fields(self.args)):
            fields = replace_fields(fields, flags.split_methods(given), self.args.preset)
        config = NeuronALConfig.from_dict(fields)
        check_datasets([config.dataset])
        return config

    def _prune(self, config: NeuronALConfig) -> None:
        args, device = self.args, flags.device_of(self.args)
        if args.push_to_hub:
            check_push(args.push_to_hub, overwrite=args.overwrite)
        with (
            process_group() as processes,
            flags.loaded(args, device, Path(args.output), processes.rank) as (dense, tokenizer),
        ):
            if args.sample and (tokenizer is None or not dense.can_generate()):
                raise ValueError(f"--sample needs a generative model and a tokenizer, not {args.model}: leave it out.")
            pruner = NeuronALPruner(config, tokenizer)
            pruner.model = dense
            answers = [answer(dense, tokenizer, args.sample)] if args.sample else []
            save_dtype = getattr(torch, args.save_dtype) if args.save_dtype else checkpoint_dtype(dense)
            model = pruner.quantize(
                args.output,
                work_dir=self._work_dir,
                evaluate=args.evaluate,
                window=args.window,
                format=args.format,
                save_dtype=save_dtype,
                batch_size=args.batch_size,
                max_hidden_bytes=args.max_hidden_bytes,
                overwrite=args.overwrite,
            )
            answers += [answer(model, tokenizer, args.sample)] if args.sample else []
            if processes.rank > 0:
                return
            write(f"\n{pruner.report}")
            for when, text in zip(("dense", "pruned"), answers):
                write(f"\nAnswer to {args.sample!r} ({when}):\n{text}")
            if pruner.report.lost_most:
                write("\nThis model has lost most of its ability; try --sparsity 0.3 or --preset best.")
            elif not pruner.report.evaluation:
                write(
                    "\nPerplexity was not measured: no calibration text is left over. Name test text with --evaluate."
                )
            hint = " in float32 (--save-dtype bfloat16 halves it)" if save_dtype == torch.float32 else ""
            write_saved(model, args.output, args.format, hint)
            if args.push_to_hub:
                how = {
                    "format": args.format,
                    "dtype": save_dtype,
                    "private": args.private,
                    "overwrite": args.overwrite,
                }
                url = pruner.push_to_hub(model, args.push_to_hub, **how)
                write(f"Published: {url}")

    @property
    def _work_dir(self) -> str | Path:
        return self.args.work_dir or hidden_directory(self.args.output)

    def after_interrupt(self) -> str:
        if not self.args.output or not Path(self._work_dir).exists():
            return ""
        return f": the same command resumes from here; to start over, delete {self._work_dir}"
