"""`compare`: combinations of saliency, top-up and sparsity, presets, and quantised models, on one model that is loaded once."""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..checkpoint.hub import public_name
from ..common.machine import reset_peak_memory
from ..common.notes import get_logger
from ..compat.accelerate import is_offloaded
from ..config.neuronal_config import NeuronALConfig
from ..data.calibration import as_token_ids
from ..evaluation.evaluated_model import as_model
from ..evaluation.perplexity import evaluate_perplexity, load_windows
from ..evaluation.tasks import evaluate_tasks
from ..files.atomic import write_atomically
from ..model.packed_size import packed_size
from ..model.projections import trial_weights
from ..pruning.calibrating import draw_calibration, own_tokenizer
from ..pruning.context import PruneContext, alone_with, check, default_batch_size, identity, versions
from ..pruning.prune import find_changes
from ..pruning.reporting import make_report
from ..pruning.rotate import rotated
from ..rotation.learning import Rotation
from ..saliency.plan import row_sparsity
from ..trials.cache import Cache
from .comparison import Comparison, check_output
from .results import DENSE, Result
from .settings import ComparisonSettings


logger = get_logger(__name__)

# Fields of a report that a result has too.
REPORTED = ("bits_per_weight", "achieved_sparsity", "peak_memory", "block_lambda", "row_lambda", "decisions", "config")
BINS = 64  # of the rows of a weight in a heat map
EXPECTED = (ValueError, TypeError, RuntimeError, MemoryError, OSError)
RECORDS = "results"  # folder of finished results in the output directory
LONGEST = 80  # characters of a method's name in that of a file; a digest makes it unique


def compare(
    model: PreTrainedModel | str | Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    saliencies: Sequence[str] = ComparisonSettings.saliencies,
    topups: Sequence[str] = ComparisonSettings.topups,
    sparsities: Sequence[float] = ComparisonSettings.sparsities,
    presets: Sequence[str] = (),
    bits_per_weight: Sequence[float] = (),
    dataset: Any = "c4",
    evaluate: Sequence | Mapping[str, Any] = ("wikitext2",),
    tasks: Sequence[str] = (),
    limit: int | None = None,
    include_path: str | Path | None = None,
    max_windows: int | None = None,
    output: str | Path | None = None,
    overwrite: bool = False,
    batch_size: int | None = None,
    max_hidden_bytes: int | None = None,
    **config: Any,
) -> Comparison:
    """Prune a model in many ways; measure the loss and the storage of each. Afterwards the model is as before.

    Combinations share the work on the dense model. A combination that fails is a result with its error.

    Args:
        model (`PreTrainedModel`, `str` or `Path`): a dense decoder model with its weights in memory, or where to load it from.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): None: the tokenizer of the model's own checkpoint.
        saliencies, topups (`Sequence[str]`): methods, with hyper-parameters if wanted: `"owl:half_width=0.1"`.
        sparsities (`Sequence[float]`): each in [0, 1).
        presets (`Sequence[str]`): `"paper"`, `"fast"`, `"best"`: at each sparsity one more prune for every preset, which
            chooses saliency, top-up and rotation as in a prune that names none.
        bits_per_weight (`Sequence[float]`): budgets of quantised models to compare with; further fields that only prunes to
            zeros know are left out for them.
        dataset: calibration data, as for [`NeuronALPruner.prune`].
        evaluate (`Sequence` or `dict`): test sets, each as for [`evaluate_perplexity`]; or name -> test set.
        tasks, limit, include_path: zero-shot tasks, as for [`evaluate_tasks`].
        max_windows (`int`, *optional*): windows per test set.
        output (`str` or `Path`, *optional*):
            Directory for tables and for finished results, which a later call does not run again.
        overwrite (`bool`):
            True runs finished combinations again, and permits to replace files that no comparison wrote.
        batch_size, max_hidden_bytes (`int`, *optional*): as for [`NeuronALPruner.prune`].
        config: further fields of [`NeuronALConfig`] for all combinations: `num_samples`, `seq_length`, ...

    Raises:
        `ValueError`, `TypeError`: unknown methods or presets, or a model and data that no combination can work with.
        `RuntimeError`: another thread prunes the model.
        `FileExistsError`: the directory holds a file with the name of a table, and no comparison wrote it.
    """
    chosen: dict[str, Any] = {"saliencies": saliencies, "topups": topups, "sparsities": sparsities}
    chosen |= {
        "presets": presets,
        "bits_per_weight": bits_per_weight,
        "dataset": dataset,
        "evaluate": evaluate,
        "max_windows": max_windows,
    }
    chosen |= {"tasks": tasks, "limit": limit, "include_path": include_path}
    chosen |= {"batch_size": batch_size, "max_hidden_bytes": max_hidden_bytes}
    settings = ComparisonSettings(**chosen, config=config)
    if output is not None:
        check_output(output, overwrite)
    return Measurements(*as_model(model, tokenizer), settings).compare(output, overwrite)


class Measurements:
    """Measurements of the dense model and of each combination, with everything that combinations share.

    The model's weights are put back after each. [`compare`] has the arguments and the errors.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, settings: ComparisonSettings
    ):
        self.model, self.settings = model, settings
        self.decoder = check(model, settings.possible[0]).decoder
        if any(is_offloaded(projection.module) for projection in self.decoder.projections.values()):
            raise ValueError("compare tries weights in memory: load the model without offloading.")
        self.calibration = draw_calibration(model, settings.calibrated, tokenizer, settings.dataset)
        self.shared: dict[str, Any] = {"calibration": self.calibration}
        self.shared |= {"batch_size": settings.batch_size, "max_hidden_bytes": settings.max_hidden_bytes}
        self.caches: dict[Rotation | None, Cache] = {}  # the latest rotation's: another has other hidden states
        self.tokenizer = tokenizer or (self.calibration and self.calibration.tokenizer)
        if settings.tasks or any(as_token_ids(test) is None for test in settings.tests.values()):
            self.tokenizer = self.tokenizer or own_tokenizer(model)
        length, most = settings.calibrated.seq_length, settings.max_windows
        self.windows = {
            name: load_windows(model.config, self.tokenizer, test, length, most)
            for name, test in settings.tests.items()
        }
        self.task_options: dict[str, Any] = {"limit": settings.limit, "include_path": settings.include_path}

    def compare(self, output: str | Path | None = None, overwrite: bool = False) -> Comparison:
        """Return the results of all combinations, measured or read from the output directory."""
        ids = torch.empty(0, 0, dtype=torch.int64) if self.calibration is None else self.calibration.ids
        tests = {name: hashlib.sha256(test.numpy().tobytes()).hexdigest() for name, test in self.windows.items()}
        depends_on: dict[str, Any] = {**identity(self.model, self.decoder, ids), "versions": versions()}
        depends_on |= {"tests": tests, "tasks": self.settings.tasks, **self.task_options}
        find = partial(_recorded, output, overwrite, depends_on)
        with alone_with(self.model):
            dense = find(Result(0.0, DENSE, DENSE), {}, self.dense)
            calibration = {} if self.calibration is None else self.calibration.to_dict()
            comparison = Comparison(public_name(self.model), dense, [], calibration, versions())
            for result, config in logging.tqdm(
                self.settings.combinations, "Comparing", unit="combination", disable=None
            ):
                if config is not None:
                    result = find(result, config.to_dict(), partial(self.run, result, config))
                if result.error is not None:
                    logger.warning(f"{result.method} failed: {result.error}")
                comparison.results.append(result)
                if output is not None:
                    comparison.save(output, overwrite)
        return comparison

    def dense(self) -> Result:
        """Return the figures of the dense model."""
        size = packed_size(self.decoder, lambda projection: 0)
        return Result(0.0, DENSE, DENSE, **self._figures(), bits_per_weight=size.bits_per_weight)

    def run(self, combination: Result, config: NeuronALConfig) -> Result:
        """Return the figures of one combination, from search to test; the model's weights are put back."""
        reset_peak_memory()
        try:
            context = PruneContext.of(self.decoder, config)
            rotation = context.methods.rotation
            self.caches = {rotation: self.caches.get(rotation) or Cache(lasting=True)}
            context = replace(context, cache=self.caches[rotation], **self.shared)
            with rotated(context, always_undo=True) as facts:
                outcome = find_changes(context)
                report = make_report(context, outcome, rotation=facts)
                with trial_weights(list(self.decoder.projections.values()), lambda p: outcome.changes[p.name]):
                    rows = self._row_sparsity() if context.methods.topup.by_row else {}
                    figures = self._figures()
        except EXPECTED as error:
            return replace(combination, error=" ".join(f"{error}".split()) or type(error).__name__)
        return replace(
            combination,
            **figures,
            **{name: getattr(report, name) for name in REPORTED},
            block_sparsity=list(report.blocks.values()),
            row_sparsity=rows,
            rotation_seconds=report.seconds.get("rotation", 0.0),
            allocation_seconds=report.seconds["allocation"],
            pruning_seconds=report.seconds["pruning"],
        )

    def _row_sparsity(self) -> dict[str, list[float]]:
        """Return projection name -> mean sparsity of `BINS` stretches of its rows; small projections are left out."""
        return {
            name: [round(part.mean().item(), 4) for part in row_sparsity(projection.weight).tensor_split(BINS)]
            for name, projection in self.decoder.projections.items()
            if projection.shape[0] >= BINS
        }

    def _figures(self) -> dict[str, Any]:
        """Return perplexity and accuracy of the model with its present weights."""
        perplexity = {
            name: evaluate_perplexity(self.model, None, ids, batch_size=default_batch_size(ids.shape[1]))
            for name, ids in self.windows.items()
        }
        accuracy = {}
        if self.settings.tasks:
            results = evaluate_tasks(self.model, self.tokenizer, self.settings.tasks, **self.task_options)
            accuracy = {name: asdict(result) for name, result in results.items()}
        return {"perplexity": perplexity, "accuracy": accuracy}


def _recorded(
    output: str | Path | None,
    overwrite: bool,
    depends_on: Mapping[str, Any],
    combination: Result,
    config: Mapping[str, Any],
    make: Callable[[], Result],
) -> Result:
    """Return the result of a combination that an output directory records, or make and record it; failures are not recorded.

    The name of a record holds a digest of `depends_on` and of the config, so that no other result is taken for it.
    """
    if output is None:
        return make()
    content = json.dumps([config, depends_on], sort_keys=True, default=str)
    words = [f"{combination.sparsity:g}", combination.saliency[:LONGEST], combination.topup[:LONGEST]]
    words += [] if combination.budget is None else [f"{combination.budget:g}bits"]
    name = re.sub(r"[^\w.-]", "_", "-".join([*words, hashlib.sha256(content.encode()).hexdigest()[:12]]))
    path = Path(output) / RECORDS / f"{name}.json"
    if path.exists() and not overwrite:
        with suppress(ValueError, TypeError):  # a damaged record is made again
            return Result(**json.loads(path.read_text(encoding="utf-8")))
    result = make()
    if result.error is None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, (json.dumps(asdict(result), indent=2) + "\n").encode())
    return result
