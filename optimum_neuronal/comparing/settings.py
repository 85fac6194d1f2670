"""Settings of a comparison, checked before a model is loaded."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import product
from pathlib import Path
from typing import Any

from ..common.processes import Processes
from ..common.registry import parse_method
from ..common.validation import check_choice, check_number, check_several, check_texts, closest_or_all
from ..config.config_fields import as_json
from ..config.neuronal_config import LEAST_BITS, MOST_BITS, OF_ZEROS, NeuronALConfig
from ..config.presets import PRESETS
from ..evaluation.perplexity import name_test_sets
from ..evaluation.tasks import load_tasks
from ..pruning.context import check_memory
from ..pruning.context import check_texts as check_data
from ..saliency import SALIENCIES
from ..topup import TOPUPS
from .results import PRESET, QUANTISED, RATES, Result


@dataclass
class ComparisonSettings:
    """Settings of a comparison. [`compare`] has the arguments and the errors that need no model.

    `config` holds further fields of [`NeuronALConfig`]. Further attributes are found from the arguments:

    - `combinations`: each, in the order asked for, with its config; with an error and None if it is not possible.
    - `possible`: the configs alone, at least one; `calibrated` is one that needs calibration, if any does.
    - `tests`: name -> test set.
    """

    dataset: Any = "c4"
    evaluate: Sequence | Mapping[str, Any] = ("wikitext2",)
    saliencies: Sequence[str] = ("wanda",)
    topups: Sequence[str] = ("uniform", "neuronal", "search")
    sparsities: Sequence[float] = (0.6, 0.7, 0.8)
    presets: Sequence[str] = ()
    bits_per_weight: Sequence[float] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    max_windows: int | None = None
    tasks: Sequence[str] = ()
    limit: int | None = None
    include_path: str | Path | None = None
    batch_size: int | None = None
    max_hidden_bytes: int | None = None
    combinations: list[tuple[Result, NeuronALConfig | None]] = field(init=False)
    possible: list[NeuronALConfig] = field(init=False)
    calibrated: NeuronALConfig = field(init=False)
    tests: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        if Processes.current().count > 1:
            raise ValueError("compare runs in one process; start it without torchrun or accelerate launch.")
        check_memory(self.batch_size, self.max_hidden_bytes)
        if self.config.get("embedding_bits") is not None:
            raise ValueError("compare quantises projections alone: leave embedding_bits out.")
        known = {entry.name for entry in fields(NeuronALConfig)}
        known -= {"sparsity", "bits_per_weight", "saliency", "saliency_args", "topup", "topup_args"}
        for name in self.config:
            if name not in known:
                hint = closest_or_all(name, sorted(known | {entry.name for entry in fields(self) if entry.init}))
                raise TypeError(f"compare has no argument {name!r}.{hint}")
        wanted = self._wanted()
        others, self.combinations = as_json(self.config), []
        for result in wanted:
            config = None
            try:
                config = make_config(result, self.dataset, others)
            except ValueError as error:
                result.error = " ".join(str(error).split())
            self.combinations.append((result, config))
        self.possible = [config for _, config in self.combinations if config is not None]
        if not self.possible:
            raise ValueError(f"No combination is possible: {self.combinations[0][0].error}")
        self.calibrated = max(self.possible, key=lambda config: config.make_methods().needs_calibration)
        self.tests = name_test_sets(self.evaluate)
        self.tasks = check_texts("tasks", self.tasks, "['boolq']")
        check_data(self.calibrated, [test for test in self.tests.values() if isinstance(test, str)])
        if self.tasks:
            load_tasks(self.tasks, self.include_path)

    def _wanted(self) -> list[Result]:
        """Return all combinations asked for, each once. Raise `ValueError` or `TypeError` for what is unknown, or for none."""
        saliencies = check_texts("saliencies", self.saliencies, "['wanda']")
        topups = check_texts("topups", self.topups, "['search']")
        sparsities = check_several("sparsities", self.sparsities, "[0.6, 0.7]")
        presets = check_texts("presets", self.presets, "['fast']")
        budgets = check_several("bits_per_weight", self.bits_per_weight, "[2.4, 3]")
        for registry, methods in ((SALIENCIES, saliencies), (TOPUPS, topups)):
            for method in methods:
                registry.get(parse_method(method)[0])
        for sparsity in sparsities:
            check_number("sparsities", sparsity, 0, 1)
        for preset in presets:
            check_choice("presets", preset, list(PRESETS))
        for budget in budgets:
            check_number("bits_per_weight", budget, LEAST_BITS, MOST_BITS, above=True)
        wanted = [Result(*own) for own in dict.fromkeys(product(sparsities, saliencies, topups))]
        wanted += [Result(sparsity, PRESET, name) for sparsity, name in dict.fromkeys(product(sparsities, presets))]
        wanted += [Result(0.0, QUANTISED, RATES, budget=budget) for budget in dict.fromkeys(budgets)]
        if not wanted:
            raise ValueError(
                "There is nothing to compare: name a saliency, a top-up and a sparsity, a preset and a sparsity, or a number of "
                "bits a weight."
            )
        return wanted


def make_config(combination: Result, dataset: Any, others: Mapping[str, Any]) -> NeuronALConfig:
    """Return the config of a combination, with the other fields given. Raise `ValueError` if it is not possible.

    The other fields replace a preset's. Of the calibration data, the config holds a name or a path only.
    """
    source = dataset if isinstance(dataset, str) else None
    if combination.budget is not None:
        return NeuronALConfig(bits_per_weight=combination.budget, dataset=source, **_of_both(others))
    if combination.saliency == PRESET:
        fields = {**PRESETS[combination.topup], **others, "dataset": source, "sparsity": combination.sparsity}
        return NeuronALConfig(**fields)
    topup, topup_args = parse_method(combination.topup)
    own = {name: getattr(combination, name) for name in ("sparsity", "saliency", "topup")}
    return NeuronALConfig(**own, topup_args=topup_args, dataset=source, **others)


def _of_both(others: Mapping[str, Any]) -> dict[str, Any]:
    """Return the other fields without those that only a prune to zeros knows."""
    return {name: value for name, value in others.items() if name not in OF_ZEROS}
