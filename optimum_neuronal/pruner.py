"""`NeuronALPruner`: prunes and saves models as a `NeuronALConfig` says."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from optimum.quantization_base import OptimumQuantizer
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from .checkpoint.hub import push_pruned
from .checkpoint.saving import check_saveable, save_pruned
from .checkpoint.writing import SaveOptions
from .common.notes import announce, get_logger
from .common.processes import Processes
from .common.torch_state import MemoryLimits, default_device
from .config.neuronal_config import NeuronALConfig
from .evaluation.answers import DenseAnswers
from .evaluation.perplexity import digest, load_tests, measure, name_test_sets, report_tests
from .files.output import Output, check_output
from .files.records import remove_records, work_directory
from .model.load_model import check_unquantized, checkpoint_dtype, load_model, load_streamed
from .model.origin import find_tokenizer
from .model.sources import locate
from .model.sparsity import KEY
from .pruning.prepare import PruneContext, prepare
from .pruning.prune import prune_model
from .report import PruningReport


logger = get_logger(__name__)

CALIBRATION_TEST = "held-out calibration text"  # name of the test set if the user gives none


@dataclass(frozen=True)
class PruningJob:
    """What [`prune_and_save`] does."""

    output: Output
    tests: Mapping[str, Any]  # name -> test set
    options: SaveOptions  # without a dtype, the checkpoint's
    memory: MemoryLimits
    window: int | None = None
    max_windows: int | None = None
    answers: bool | Sequence[Any] = False  # True: to built-in prompts
    dataset: Any = None  # calibration data instead of the config's


class NeuronALPruner(OptimumQuantizer):
    """Prunes language models without retraining.

    ```python
    pruner = NeuronALPruner(NeuronALConfig(sparsity=0.7, dataset="c4"), tokenizer)
    model = pruner.prune(model)
    pruner.save(model, "llama-70")
    ```

    Args:
        config ([`NeuronALConfig`]): how to prune.
        tokenizer (`PreTrainedTokenizerBase`, `ProcessorMixin` or `str`, *optional*):
            For calibration text, and saved with the model. None: each model's own, from its checkpoint.

    Attributes:
        model (`PreTrainedModel`): loaded by `from_pretrained`; None otherwise.
        tokenizer (`PreTrainedTokenizerBase`): the given one, or else the latest model's own; None if it has none.
        report ([`PruningReport`]): of the last pruning run; None before the first.
    """

    def __init__(self, config: NeuronALConfig, tokenizer: PreTrainedTokenizerBase | str | Path | None = None):
        super().__init__()
        if not isinstance(config, NeuronALConfig):
            raise TypeError(f"config is a {type(config).__name__}: expected a NeuronALConfig.")
        self.config = config
        self._given = AutoTokenizer.from_pretrained(tokenizer) if isinstance(tokenizer, str | Path) else tokenizer
        self._own: PreTrainedTokenizerBase | None = None  # of self.model's checkpoint
        self._last: PreTrainedTokenizerBase | None = None  # of the last pruned model's
        self._pruned: tuple[str, dict[str, Any]] | None = None  # path and sparsity_config of the last pruned model
        self.report: PruningReport | None = None
        self.model: PreTrainedModel | None = None

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        return self._given or self._last

    @classmethod
    def from_pretrained(
        cls,
        model_or_path: str | Path,
        file_name: None = None,
        *,
        config: NeuronALConfig,
        tokenizer: PreTrainedTokenizerBase | str | None = None,
        stream_to: str | Path | None = None,
        device: torch.device | None = None,
        **model_kwargs: Any,
    ) -> "NeuronALPruner":
        """Load a dense model as the class that its config names. [`~NeuronALPruner.quantize`] prunes and saves it.

        Args:
            model_or_path (`str` or `Path`): Hub id or directory of the dense model, or a GGUF file.
            file_name: part of optimum's interface; None, since a model is more than one file.
            config ([`NeuronALConfig`]): how to prune.
            tokenizer (*optional*): as for the class; None: the checkpoint's own.
            stream_to (`str` or `Path`, *optional*):
                For models larger than memory: the blocks' weights stay on disk and are read one block at a time. Names
                a folder for weights that have to be rewritten, see [`load_streamed`].
            device (`torch.device`, *optional*): with `stream_to`: where to compute. None: the accelerator, or the CPU.
            model_kwargs: for transformers' `from_pretrained`: `dtype`, `device_map`, `revision`, ...
        """
        if file_name is not None:
            raise ValueError(f"file_name is {file_name!r}: expected None, since the whole checkpoint is loaded.")
        pruner, source = cls(config, tokenizer), locate(model_or_path, model_kwargs)
        check_unquantized(source)
        if stream_to is None:
            pruner.model = load_model(source)
        else:
            pruner.model = load_streamed(source, device or default_device(), stream_to)
        if pruner.tokenizer is None:
            pruner._own = pruner._last = find_tokenizer(source)
        return pruner

    def quantize(
        self,
        save_dir: str | Path,
        file_prefix: None = None,
        *,
        dataset: Any = None,
        work_dir: str | Path | None = None,
        evaluate: Sequence | Mapping[str, Any] = (),
        window: int | None = None,
        max_windows: int | None = None,
        answers: bool | Sequence[Any] = False,
        format: str | None = None,
        save_dtype: torch.dtype | None = None,
        batch_size: int | None = None,
        max_hidden_bytes: int | None = None,
        overwrite: bool = False,
    ) -> PreTrainedModel:
        """Prune the model of [`~NeuronALPruner.from_pretrained`], save it, and return it.

        Args:
            save_dir (`str` or `Path`): absent, or an empty directory; checked before the work starts, and at its end.
            file_prefix: part of optimum's interface; None, since transformers names the files.
            dataset (*optional*): as for [`~NeuronALPruner.prune`].
            work_dir (`str` or `Path`, *optional*): as for [`~NeuronALPruner.prune`]; removed when the model is saved.
            evaluate (`Sequence` or `dict`):
                Test sets, each as for [`evaluate_perplexity`], or name -> test set. Report and model card show the
                perplexities before and after. Without any, a few held-out sequences of the calibration text
                are used, if there are some.
            window (`int`, *optional*): tokens per test window. None: the smaller of 2048 and the model's limit.
            max_windows (`int`, *optional*): measure on at most this many windows of each test set. None or 0: all.
            answers (`bool` or `Sequence`): True, or prompts: compare the answers before and after, see [`compare_answers`].
            format (`str`, *optional*): `"dense"` or `"packed"`. None: dense.
            save_dtype (`torch.dtype`, *optional*):
                Dtype to save in. None: the checkpoint's, even if `from_pretrained` got another one to compute in.
            batch_size, max_hidden_bytes (`int`, *optional*): as for [`~NeuronALPruner.prune`].
            overwrite (`bool`): True to replace a model's directory at `save_dir`, with all that is in it.
        """
        if file_prefix is not None:
            raise ValueError(f"file_prefix is {file_prefix!r}: expected None, since transformers names the files.")
        if self.model is None:
            raise ValueError("There is no model to prune: make the pruner with NeuronALPruner.from_pretrained(...).")
        output = check_output(save_dir, overwrite, [self.model.config.name_or_path])
        options, memory = SaveOptions(format, save_dtype), MemoryLimits(batch_size, max_hidden_bytes)
        tests = name_test_sets(evaluate)
        job = PruningJob(output, tests, options, memory, window, max_windows, answers, dataset)
        with work_directory(work_dir, save_dir) as folder:
            return prune_and_save(self, self.model, job, folder)

    def prune(
        self,
        model: PreTrainedModel,
        dataset: Any = None,
        work_dir: str | Path | None = None,
        *,
        batch_size: int | None = None,
        max_hidden_bytes: int | None = None,
    ) -> PreTrainedModel:
        """Set weights of the model to zero, in place.

        All weights change at the very end: after an error or an interrupt, they are as they were. No other thread may use
        the model meanwhile: it would compute with trial weights, and disturb the pruning. The processes
        of a `torch.distributed` group share the work, and each prunes its own copy of the model.

        Args:
            model (`PreTrainedModel`):
                A dense decoder model. Weights that accelerate offloads (`device_map`) are read block by block. They
                become sparse each time they are read, and no file is changed.
            dataset (*optional*):
                Calibration data instead of the config's: a name or path, a list of strings or conversations, a
                `datasets.Dataset`, one of its columns, an `IterableDataset`, or token ids of shape (num_samples,
                seq_length) without padding.
            work_dir (`str` or `Path`, *optional*):
                Where finished steps and blocks are recorded: absent or empty, and of this run alone. After a crash, the
                same call resumes from there, with a bit-identical result.
            batch_size (`int`, *optional*):
                Sequences per forward pass on an accelerator, which change the result by rounding at most. None: about
                8192 tokens. On a CPU it is ignored: sequences run one at a time.
            max_hidden_bytes (`int`, *optional*):
                Hidden states of the calibration sequences beyond this many bytes are kept in CPU memory. Does not
                change the result. None: they stay on the device.

        Returns:
            `PreTrainedModel`: the same model. `model.config.sparsity_config` records how it was pruned.

        Raises:
            `ValueError`, `TypeError`: the model, the data and the config do not fit together.
            `BlockingIOError`: another run uses the work directory.
        """
        memory = MemoryLimits(batch_size, max_hidden_bytes)
        with work_directory(work_dir) as folder:
            context = self._prepare(model, dataset, folder, memory)
            self._remember(context, prune_model(context))
        return model

    def _prepare(
        self, model: PreTrainedModel, dataset: Any, folder: Path | None, memory: MemoryLimits
    ) -> PruneContext:
        tokenizer = self._given or (self._own if model is self.model else None)
        return prepare(model, self.config, dataset, tokenizer=tokenizer, folder=folder, memory=memory)

    def _remember(self, context: PruneContext, report: PruningReport) -> None:
        """Note what was pruned, so that `save` can check that it is given the same model."""
        self.report, self._last = report, context.tokenizer
        self._pruned = context.model.config.name_or_path, getattr(context.model.config, KEY)

    def save(
        self,
        model: PreTrainedModel,
        directory: str | Path,
        format: str | None = None,
        dtype: torch.dtype | None = None,
        overwrite: bool = False,
    ) -> None:
        """Save the model that this pruner pruned last, or a copy, with tokenizer, report and model card.

        Only the first process writes.

        Args:
            model (`PreTrainedModel`): what `prune` returned.
            directory, dtype, overwrite: as for [`save_pretrained`].
            format (`str`, *optional*):
                `"dense"` or `"packed"`, see [`save_pretrained`]. None: packed if the model computes with packed weights.

        Raises:
            `ValueError`: the model is not the last one that this pruner pruned, or the format does not fit it.
            `FileExistsError`: something lies there that may not be replaced.
        """
        report, processes = self._report_of(model), Processes.current()
        if processes.rank == 0:
            output = check_output(directory, overwrite, [model.config.name_or_path])
            save_pruned(model, output, report, self.tokenizer, check_saveable(model, SaveOptions(format, dtype)))
        processes.from_first(None)  # the others wait

    def push_to_hub(self, model: PreTrainedModel, repo_id: str, **kwargs: Any) -> str:
        """Publish the model that this pruner pruned last, and return the commit's URL.

        Keyword arguments: `format`, `dtype`, `private`, `overwrite`, `token`, `revision` and `commit_message`, all
        optional, as for [`push_pruned`]. Only the first process uploads.
        """
        report, processes = self._report_of(model), Processes.current()
        url = push_pruned(model, repo_id, report, self.tokenizer, **kwargs) if processes.rank == 0 else ""
        return processes.from_first(url)

    def _report_of(self, model: PreTrainedModel) -> PruningReport:
        if self.report is None:
            raise ValueError("This pruner has pruned nothing yet: call prune(model) first.")
        if (model.config.name_or_path, getattr(model.config, KEY, None)) != self._pruned:
            raise ValueError(
                "The model is not the one that this pruner pruned last, so its report and model card would be wrong. Save "
                "it before you prune another model, or use model.save_pretrained(directory)."
            )
        return self.report


def prune_and_save(
    pruner: NeuronALPruner, model: PreTrainedModel, job: PruningJob, folder: Path | None = None
) -> PreTrainedModel:
    """Prune, measure and save a model, as a checked job says. `folder`: of [`work_directory`]."""
    memory = job.memory
    options = check_saveable(model, replace(job.options, dtype=job.options.dtype or checkpoint_dtype(model)))
    context = pruner._prepare(model, job.dataset, folder, memory)
    sets = load_tests(job.tests, model, context.tokenizer, job.window, job.max_windows, pruner.config.add_bos)
    calibration = context.calibration
    if not sets and calibration is not None and calibration.held_out is not None and model.can_generate():
        sets = {CALIBRATION_TEST: replace(calibration, ids=calibration.held_out)}
    records = context.evaluator.records
    dense, _ = records.recorded(f"dense-{digest(sets)}", lambda: (measure(model, sets, memory.batch_size), {}))
    if records.processes.rank == 0:
        for name, value in dense.items():
            announce(f"perplexity of the dense model, {name}: {value:.2f}")
    asked = job.answers and DenseAnswers(model, context.tokenizer, None if job.answers is True else job.answers)
    context.clock.lap("evaluation")
    report, pruned = prune_model(context), {}
    pruner._remember(context, report)
    try:
        pruned = measure(model, sets, memory.batch_size)
    except ValueError as error:  # the pruned model is saved all the same
        logger.warning(f"The perplexity of the pruned model could not be measured. {error}")
    answers = asdict(asked.compare(model)) if asked else {}
    context.clock.lap("evaluation")
    evaluation = report_tests(sets, dense=dense, pruned=pruned)
    seconds = dict(context.clock.seconds)
    pruner.report = replace(report, evaluation=evaluation, answers=answers, seconds=seconds)
    if records.processes.rank == 0:
        save_pruned(model, job.output, pruner.report, pruner.tokenizer, options)
    records.processes.from_first(None)  # the others wait
    remove_records(folder)
    return model
