"""`NeuronALPruner`: prunes a model as a `NeuronALConfig` says, from checks to report."""

import platform
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from optimum.quantization_base import OptimumQuantizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from . import __version__
from .blocks import check_model, check_pattern, check_weights, find_decoder
from .calibration import CalibrationSet, as_token_ids, draw_sequences, resolve_seq_length
from .capture import inference
from .config import NeuronALConfig
from .final_pruning import FinalPruning
from .identity import identity
from .journal import Journal
from .masks import PackedMask, apply_change
from .memory import with_less_memory
from .offload import default_device, execution_device, is_offloaded, mask_offloaded
from .processes import Processes
from .projections import Decoder
from .report import PruningReport, measure_sparsity, peak_memory, short_form
from .saving import check_saveable, check_space, push_pruned, save_pruned
from .streaming import load_streamed
from .sweep import Sweep
from .topup import Allocation


MEMORY_KNOBS = ("batch_size", "max_hidden_bytes", "format")  # fields of the config that do not change the masks
TOKENS_PER_FORWARD = 2048  # enough to keep a processor busy, and no more memory than one of the paper's sequences


class NeuronALPruner(OptimumQuantizer):
    """Prunes language models without retraining.

    ```python
    pruner = NeuronALPruner(NeuronALConfig(sparsity=0.7, dataset="c4"), tokenizer)
    model = pruner.prune(model)
    pruner.save(model, "llama-70")
    ```

    Args:
        config ([`NeuronALConfig`]): how to prune.
        tokenizer (`PreTrainedTokenizerBase` or `str`, *optional*):
            For calibration text, and saved with the model. None: the one of the model's own checkpoint.

    Attributes:
        model (`PreTrainedModel`): what `from_pretrained` loaded; None otherwise.
        report ([`PruningReport`]): of the last prune; None before.
    """

    def __init__(self, config: NeuronALConfig, tokenizer: PreTrainedTokenizerBase | str | None = None):
        super().__init__()
        if not isinstance(config, NeuronALConfig):
            raise TypeError(f"config is a {type(config).__name__}: expected a NeuronALConfig.")
        self.config = config
        self.tokenizer = AutoTokenizer.from_pretrained(tokenizer) if isinstance(tokenizer, str) else tokenizer
        self.report: PruningReport | None = None
        self.model: PreTrainedModel | None = None

    @classmethod
    def from_pretrained(
        cls,
        model_or_path: str | Path,
        file_name: str | None = None,
        *,
        config: NeuronALConfig,
        tokenizer: PreTrainedTokenizerBase | str | None = None,
        stream_to: str | Path | None = None,
        device: torch.device | None = None,
        **model_kwargs,
    ) -> "NeuronALPruner":
        """Loads a dense model, to be pruned and saved by [`~NeuronALPruner.quantize`].

        Args:
            model_or_path (`str` or `Path`): Hub id or directory of the dense model.
            file_name: part of optimum's interface; a model is more than one file, so it must be None.
            config ([`NeuronALConfig`]): how to prune.
            tokenizer (*optional*): as for the class; None: the checkpoint's own.
            stream_to (`str` or `Path`, *optional*):
                For models larger than memory: the blocks' weights stay on disk and are read one block at a time. Names
                a folder for those that have to be rewritten, see [`load_streamed`].
            device (`torch.device`, *optional*): with `stream_to`: where to compute. None: the accelerator, or the CPU.
            model_kwargs: for `AutoModelForCausalLM.from_pretrained`: `dtype`, `device_map`, `revision`, ...
        """
        if file_name is not None:
            raise ValueError(f"file_name is {file_name!r}: expected None, since the whole checkpoint is loaded.")
        pruner = cls(config, tokenizer)
        if stream_to is None:
            pruner.model = AutoModelForCausalLM.from_pretrained(model_or_path, **model_kwargs)
        else:
            pruner.model = load_streamed(model_or_path, device or default_device(), stream_to, **model_kwargs)
        if pruner.tokenizer is None:
            shared = {
                key: model_kwargs[key] for key in ("revision", "trust_remote_code", "token") if key in model_kwargs
            }
            with suppress(OSError, ValueError):  # a model may come without one; only calibration text needs it
                pruner.tokenizer = AutoTokenizer.from_pretrained(model_or_path, **shared)
        return pruner

    def quantize(
        self,
        save_dir: str | Path,
        file_prefix: str | None = None,
        *,
        dataset=None,
        work_dir: str | Path | None = None,
    ) -> PreTrainedModel:
        """Prunes the model of [`~NeuronALPruner.from_pretrained`], saves it, and returns it.

        Args:
            save_dir (`str` or `Path`): where to save; checked before the work starts.
            file_prefix: part of optimum's interface; must be None, since transformers names the files.
            dataset (*optional*): as for [`~NeuronALPruner.prune`].
            work_dir (`str` or `Path`, *optional*): as for [`~NeuronALPruner.prune`]; removed when the model is saved.
        """
        if file_prefix is not None:
            raise ValueError(f"file_prefix is {file_prefix!r}: expected None, since transformers names the files.")
        if self.model is None:
            raise ValueError("There is no model to prune: make the pruner with NeuronALPruner.from_pretrained(...).")
        check_saveable(self.model)
        check_space(self.model, save_dir)
        model = self.prune(self.model, dataset, work_dir)
        self.save(model, save_dir)
        if work_dir is not None and Processes.current().rank == 0:
            shutil.rmtree(work_dir)
        return model

    def prune(self, model: PreTrainedModel, dataset=None, work_dir: str | Path | None = None) -> PreTrainedModel:
        """Sets weights of the model to zero, in place.

        A prune that fails or is interrupted leaves every weight as it was: masks are applied at the very end. Under
        torchrun or `accelerate launch` the processes share the work, and each prunes its own copy of the model.

        Args:
            model (`PreTrainedModel`):
                A dense decoder model. What accelerate has offloaded (`device_map`) is read block by block; the sparse
                weights are then made whenever they are read, and no file is changed.
            dataset (*optional*):
                Calibration data instead of the config's: a name or path as there, a list of strings, a
                `datasets.Dataset`, or token ids of shape (num_samples, seq_length).
            work_dir (`str` or `Path`, *optional*):
                Where finished steps and blocks are recorded. The same call goes on from there after a crash, with the
                same result to the bit.

        Returns:
            `PreTrainedModel`: the same model. `model.config.sparsity_config` tells how it was pruned.

        Raises:
            `ValueError`, `TypeError`: the model, the data and the config do not fit; the message says what to do.
            `MemoryError`: too little memory, even with half the batch.
        """
        clock = _Clock()
        decoder, saliency, topup = self._check(model)
        if torch.accelerator.is_available():
            torch.accelerator.reset_peak_memory_stats()
        needs_calibration = saliency.uses_activations or topup.uses_calibration or topup.refines
        calibration = self._draw(model, dataset) if needs_calibration else None
        clock.lap("calibration data")
        ids = torch.empty(0, 0, dtype=torch.int64) if calibration is None else calibration.ids
        journal = self._journal(work_dir, model, decoder, ids)

        def find_masks(batch_size: int) -> tuple[FinalPruning, Allocation, dict[str, PackedMask]]:
            sweep = self._sweep(model, decoder, saliency, ids, batch_size, journal)
            if needs_calibration:
                sweep.check_replay()
            allocation = topup.allocate(sweep, self.config.sparsity)
            clock.lap("allocation")
            refine = topup.refine if topup.refines else None
            pruning = FinalPruning(sweep, allocation.plan, refine, topup.statistic)
            masks = pruning.find()
            clock.lap("pruning")
            return pruning, allocation, masks

        with inference(model):
            batch_size = self.config.batch_size or max(1, TOKENS_PER_FORWARD // max(1, ids.shape[1]))
            pruning, allocation, masks = with_less_memory(find_masks, batch_size)
        with _deferred_interrupt():
            apply_masks(decoder, masks)
            self.report = self._make_report(decoder, allocation, calibration, pruning, clock.seconds)
            model.config.sparsity_config = dict(short_form(self.report))
        return model

    def _sweep(self, model, decoder: Decoder, saliency, ids: torch.Tensor, batch_size: int, journal: Journal) -> Sweep:
        return Sweep(
            decoder,
            saliency,
            ids,
            self.config.num_alignment_samples,
            batch_size,
            execution_device(model.get_input_embeddings()),
            self.config.min_expert_tokens,
            self.config.max_hidden_bytes,
            self.config.make_pattern(),
            journal,
            Processes.current(),
        )

    def _journal(self, work_dir, model: PreTrainedModel, decoder: Decoder, ids: torch.Tensor) -> Journal:
        if work_dir is None or Processes.current().rank > 0:
            return Journal()
        config = {key: value for key, value in self.config.to_dict().items() if key not in MEMORY_KNOBS}
        return Journal(work_dir, {**config, **identity(model, decoder, ids), "versions": _versions()})

    def save(self, model: PreTrainedModel, directory: str | Path) -> None:
        """Saves a model that this pruner pruned, with tokenizer, report and model card. See [`save_pruned`].

        Of several processes, the first one saves.
        """
        report, processes = self._own_report(), Processes.current()
        if processes.rank == 0:
            save_pruned(model, directory, report, self.tokenizer)
        processes.from_first(None)  # the others wait

    def push_to_hub(self, model: PreTrainedModel, repo_id: str, **kwargs) -> str:
        """Publishes a model that this pruner pruned. Arguments and return value: see [`push_pruned`]."""
        return push_pruned(model, repo_id, self._own_report(), self.tokenizer, **kwargs)

    def to_dict(self) -> dict[str, Any]:
        """The config as a JSON-serialisable dict."""
        return self.config.to_dict()

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any], tokenizer=None) -> "NeuronALPruner":
        """Makes a pruner of what [`~NeuronALPruner.to_dict`] returned."""
        return cls(NeuronALConfig.from_dict(dict(config_dict)), tokenizer)

    def _own_report(self) -> PruningReport:
        if self.report is None:
            raise ValueError("This pruner has pruned nothing yet: call prune(model) first.")
        return self.report

    def _check(self, model: PreTrainedModel):
        """Everything that can be known to be wrong before calibration data is loaded."""
        check_model(model)
        if getattr(model.config, "sparsity_config", None):
            raise ValueError(
                "The model is sparse already (model.config.sparsity_config). Load the dense model; or, to prune "
                "further, del model.config.sparsity_config first."
            )
        decoder = find_decoder(model, self.config.targets, self.config.ignore)
        check_weights(decoder.projections)
        saliency, topup = self.config.make_saliency(), self.config.make_topup()
        topup.check(decoder)
        check_pattern(decoder.projections, self.config.make_pattern())
        resolve_seq_length(model.config, self.config.seq_length)
        return decoder, saliency, topup

    def _draw(self, model: PreTrainedModel, dataset) -> CalibrationSet:
        dataset = self.config.dataset if dataset is None else dataset
        if dataset is None:
            raise ValueError(
                "No calibration data: set NeuronALConfig(dataset=...), or pass prune(model, dataset=...) text or token "
                "ids."
            )
        seq_length = self.config.seq_length
        if as_token_ids(dataset) is None:
            seq_length = resolve_seq_length(model.config, seq_length)
            self.tokenizer = self.tokenizer or _own_tokenizer(model)
        calibration = draw_sequences(
            dataset,
            self.tokenizer,
            num_samples=self.config.num_samples,
            seq_length=seq_length,
            seed=self.config.seed,
            vocab_size=model.get_input_embeddings().weight.shape[0],
        )
        resolve_seq_length(model.config, calibration.ids.shape[1])
        return calibration

    def _make_report(
        self,
        decoder: Decoder,
        allocation: Allocation,
        calibration: CalibrationSet | None,
        pruning: FinalPruning,
        seconds: dict[str, float],
    ) -> PruningReport:
        achieved, blocks, projections = measure_sparsity(decoder)
        config = self.config.to_dict()
        dataset = self.config.dataset or ""
        if Path(dataset).is_file() or Path(dataset.rpartition(":")[0]).is_file():  # FILE or FILE:COLUMN
            config["dataset"] = Path(dataset).name  # a report is published: no folders of this machine
        return PruningReport(
            config=config,
            requested_sparsity=self.config.sparsity,
            achieved_sparsity=achieved,
            blocks=blocks,
            projections=projections,
            block_lambda=allocation.decisions.get("block", {}).get("lambda"),
            row_lambda=allocation.decisions.get("row", {}).get("lambda"),
            decisions=allocation.decisions,
            calibration={} if calibration is None else calibration.to_dict(),
            seconds=seconds,
            block_forwards=pruning.engine.block_forwards,
            starved_experts=pruning.starved_experts,
            peak_memory=peak_memory(),
            versions=_versions(),
        )


def _versions() -> dict[str, str]:
    return {
        "optimum_neuronal": __version__,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def apply_masks(decoder: Decoder, masks: Mapping[str, PackedMask]) -> None:
    """Sets the weights under the masks to zero, in place; offloaded ones whenever they are read from then on."""
    with torch.no_grad():
        for name, projection in decoder.projections.items():
            if is_offloaded(projection.module):
                mask_offloaded(projection, masks[name])
            else:
                apply_change(projection.weight, masks[name].change(projection.weight.device))


def _own_tokenizer(model: PreTrainedModel) -> PreTrainedTokenizerBase:
    """The tokenizer of the model's own checkpoint."""
    origin = model.config._name_or_path
    message = "Calibration text needs a tokenizer: pass NeuronALPruner(config, tokenizer=...)."
    if not origin:
        raise ValueError(message)
    try:
        return AutoTokenizer.from_pretrained(origin)
    except (OSError, ValueError) as error:
        raise ValueError(f"{message} None could be loaded from {origin!r}: {error}") from error


@contextmanager
def _deferred_interrupt() -> Iterator[None]:
    """Holds Ctrl-C back for the moment in which weights change, and raises it afterwards."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received = []
    before = signal.signal(signal.SIGINT, lambda *_: received.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before or signal.SIG_DFL)
    if received:
        raise KeyboardInterrupt


class _Clock:
    """Seconds by phase."""

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] = now - self._last
        self._last = now
