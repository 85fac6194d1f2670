"""`optimum-cli neuronal prune`, from a dense model to a saved sparse one."""

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..checkpoint.hub import check_push
from ..common.processes import Processes, process_group
from ..config.neuronal_config import NeuronALConfig, read_config_file
from ..config.presets import PRESETS, replace_fields
from ..data.documents import read_prompts
from ..evaluation.answers import Answers
from ..evaluation.perplexity import load_tests, name_test_sets
from ..files.output import check_output
from ..files.records import hidden_directory, work_directory
from ..model.load_model import check_unquantized, checkpoint_dtype
from ..pruner import NeuronALPruner, PruningJob, prune_and_save
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

    NEEDS = flags.RESULT_NEEDS

    @staticmethod
    def add_flags(parser: argparse.ArgumentParser) -> None:
        main, result, amount, method, text, rare = map(parser.add_argument_group, GROUPS)
        flags.add_model_flags(main, rare)
        flags.add_switch(main, "--dry-run", "only show what would be pruned, and the memory that it needs")
        preset = "fields of the config under one name, which --config and flags override (default: none)"
        main.add_argument("--preset", choices=sorted(PRESETS), help=preset)
        config = "JSON file of config fields, or config.json or neuronal_report.json of a pruned model (default: none)"
        main.add_argument("--config", metavar="FILE", help=config)
        flags.add_result_flags(
            result, "the checkpoint's", "a little unused calibration text", needed="required without --dry-run"
        )
        for group, names in ((amount, AMOUNT), (method, METHOD), (text, TEXT)):
            flags.add_config_flags(group, names, {"dataset": "c4"})
        flags.add_config_flags(rare, (name for name in flags.CONFIG_FLAGS if name not in (*AMOUNT, *METHOD, *TEXT)))
        work_dir = "records of finished steps, which the same command resumes (default: hidden, next to the output)"
        rare.add_argument("--work-dir", help=work_dir)
        flags.add_import_flag(rare)
        flags.add_memory_flags(rare)

    def check(self) -> None:
        if self.args.output is None and not self.args.dry_run:
            raise ValueError("--output is missing: name a directory to save the pruned model in.")
        flags.import_modules(self.args.modules)

    def work(self) -> None:
        args, config = self.args, self.config()
        output = args.output and check_output(args.output, args.overwrite, [args.model])
        options, tests = flags.save_options_of(args), name_test_sets(args.evaluate)
        answers = args.answers if isinstance(args.answers, bool) else read_prompts(args.answers)
        job = PruningJob(output, tests, options, flags.memory_of(args), args.window, args.max_windows, answers)
        if args.push_to_hub:
            check_push(args.push_to_hub, overwrite=args.overwrite)
        source = flags.source_of(args)
        if args.dry_run:
            run = dry_run(source, config)
            load_tests(tests, run.decoder.model, run.tokenizer, args.window, args.max_windows, config.add_bos)
            write(f"\n{run}")
            return
        check_unquantized(source)
        datasets = config.dataset_names if config.methods.needs_calibration else ()
        with (
            process_group(),
            work_directory(self.unfinished(), args.output) as folder,
            flags.loaded(args, source, Path(args.output), datasets, tests.values()) as (dense, tokenizer),
        ):
            pruner = NeuronALPruner(config, tokenizer)
            model = prune_and_save(pruner, dense, job, folder)
            if Processes.current().rank == 0:
                self._show(pruner, model, options.dtype or checkpoint_dtype(model))

    def config(self) -> NeuronALConfig:
        """Return the config: of the preset, overridden by the file, overridden by flags."""
        fields: dict[str, Any] = PRESETS.get(self.args.preset, {})
        in_file = {} if self.args.config is None else read_config_file(self.args.config)
        for given in (in_file, flags.given_fields(self.args)):
            fields = replace_fields(fields, given, self.args.preset)
        config = NeuronALConfig.from_dict(fields)
        if not config.refit_epochs and self.given & {"refit_learning_rate", "refit_dtype"}:
            raise ValueError("Flags of the refit change nothing without one: set --refit-epochs, or leave them out.")
        return config

    def _show(self, pruner: NeuronALPruner, model: PreTrainedModel, dtype: torch.dtype) -> None:
        """Write what was done, and publish the model, saved in a dtype, if asked."""
        write(f"\n{pruner.report}")
        if pruner.report.answers:
            write(f"\n{Answers(**pruner.report.answers)}")
        if pruner.report.lost_most:
            write("\nThis model has lost most of its ability; try --sparsity 0.3 or --preset best.")
        elif not pruner.report.evaluation and model.can_generate():
            write("\nPerplexity was not measured: no calibration text is left over. Name test text with --evaluate.")
        hint = " in float32 (--save-dtype bfloat16 halves it)" if dtype == torch.float32 else ""
        write_saved(self.args, model, pruner.report, pruner.tokenizer, dtype, hint)

    def unfinished(self) -> str | Path | None:
        return self.args.work_dir or (self.args.output and hidden_directory(self.args.output))
