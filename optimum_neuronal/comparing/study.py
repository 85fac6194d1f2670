"""What a comparison combines and measures, checked before a model is loaded."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product
from pathlib import Path
from typing import Any

from ..common.registry import Registry, parse_method, title_of
from ..common.validation import check_choice, check_numbers, validate_list, validate_strings
from ..config.config_fields import as_json
from ..config.neuronal_config import NeuronALConfig
from ..config.presets import PRESETS
from ..evaluation.perplexity import name_test_sets
from ..evaluation.tasks import load_tasks
from ..files.output import check_writable
from ..saliency import SALIENCIES
from ..topup import TOPUPS
from .comparison import check_tables_directory
from .results import PRESET, Result


LISTS = {"sparsity": "sparsities", "saliency": "saliencies", "topup": "topups"}  # field of the config -> of the study


@dataclass
class Study:
    """A comparison, which [`run_study`] runs on any model. Its fields are the arguments of [`compare`]."""

    saliencies: Sequence[str] = ("wanda",)
    topups: Sequence[str] = ("uniform", "owl", "neuronal")
    sparsities: Sequence[float] = (0.6, 0.7, 0.8)
    presets: Sequence[str] = ()
    without: Sequence[str] = ()
    sweep: Mapping[str, Sequence[Any]] | None = None
    dataset: Any = "c4"
    evaluate: Sequence | Mapping[str, Any] = ("wikitext2",)
    window: int | None = None
    max_windows: int | None = None
    tasks: Sequence[str] = ()
    limit: int | None = None
    include_path: str | Path | None = None
    accuracy_over: Sequence[str] | None = None
    output: str | Path | None = None
    overwrite: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)  # further fields of all combinations
    keep: str | Path | None = None

    def __post_init__(self) -> None:
        self.config, self.accuracy_over = as_json(self.config), as_json(self.accuracy_over)
        self.combinations = find_combinations(self)
        self.test_sets = name_test_sets(self.evaluate)
        self.folder = None if self.output is None else Path(self.output)
        if self.folder is not None:
            check_tables_directory(self.folder, self.overwrite)
        if self.keep is not None:
            check_writable(self.keep, "keep models in")
        self.questions = load_tasks(self.tasks, self.limit, self.include_path, accuracy_only=True)

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> "Study":
        """Return the study of arguments by name. What is not a field of it is one of the config."""
        config = dict(arguments)
        own = {entry.name: config.pop(entry.name) for entry in fields(cls) if entry.name in arguments}
        return cls(**own, config=config)


@dataclass(frozen=True)
class Combination:
    """One way to prune a model."""

    result: Result  # without figures
    config: NeuronALConfig
    dataset: Any  # calibration data

    @property
    def drawn_by(self) -> tuple:
        """What decides the calibration sequences."""
        config = self.config
        fields = config.seed, config.sampling, config.num_samples, config.seq_length, config.add_bos
        return (repr(self.result.setting.get("dataset")), *fields)


def find_combinations(study: Study) -> list[Combination]:
    """Return all combinations of a study once, those of methods first. Raise `ValueError` for one that is impossible."""
    saliencies = _named("saliencies", study.saliencies, SALIENCIES)
    topups = _named("topups", study.topups, TOPUPS)
    presets = validate_strings("presets", study.presets, "['paper']")
    for preset in presets:
        check_choice("presets", preset, list(PRESETS))
    pairs = (text.partition("+")[::2] for text in validate_strings("without", study.without, "['sparsegpt+dsnot']"))
    left_out = {(_name(saliency, SALIENCIES), _name(topup, TOPUPS)) for saliency, topup in pairs}
    sparsities = as_json(validate_list("sparsities", study.sparsities, "[0.6]"))
    if sparsities:
        check_numbers("sparsities", sparsities, 0, 1)
    sweep = as_json(study.sweep or {})
    for name, values in {**study.config, **sweep}.items():
        if name in LISTS:
            raise ValueError(f"{name} is {values!r}: give a list as {LISTS[name]}.")
        if name in sweep and not values:
            raise ValueError(f"sweep has no values of {name}: name some, or leave it out.")
    wanted = [
        Result(sparsity, saliency, topup)
        for sparsity, saliency, topup in product(sparsities, saliencies, topups)
        if (saliencies[saliency], topups[topup]) not in left_out
    ]
    for preset in presets:  # at its own sparsity if it has one
        own = PRESETS[preset].get("sparsity")
        wanted += [Result(sparsity, PRESET, preset) for sparsity in (sparsities if own is None else [own])]
    if not wanted:
        raise ValueError("There is nothing to compare: name methods and a sparsity, or a preset.")
    settings = [dict(zip(sweep, values)) for values in product(*sweep.values())]
    found = [_combine(replace(result, setting=setting), study) for setting in settings for result in wanted]
    return list({one.result.method: one for one in found}.values())


def _name(text: str, registry: Registry) -> str:
    return registry.get(parse_method(text)[0]).name


def _named(argument: str, texts: Any, registry: Registry) -> dict[str, str]:
    """Return the registered name of each method's text, which may hold hyperparameters."""
    return {text: _name(text, registry) for text in validate_strings(argument, texts, f"['{registry.names()[0]}']")}


def _combine(result: Result, study: Study) -> Combination:
    """Return the combination of a result's methods and setting, with the titles of the methods."""
    dataset = result.setting.get("dataset", study.dataset)
    fields = {**study.config, **result.setting, "dataset": dataset if isinstance(dataset, str) else None}
    try:
        if result.saliency == PRESET:
            config = NeuronALConfig.preset(result.topup, sparsity=result.sparsity, **fields)
        else:
            fields |= {"sparsity": result.sparsity, "saliency": result.saliency, "topup": result.topup}
            config = NeuronALConfig.from_dict({}, **fields)
    except ValueError as error:
        pair = "+".join(text.partition(":")[0] for text in (result.saliency, result.topup))
        way_out = "" if result.saliency == PRESET else f" Or leave the pair out: without=['{pair}'], --without {pair}."
        raise ValueError(f"{result.method}: {error}{way_out}") from error
    if result.saliency == PRESET:
        titles = {"topup": f"{result.topup} ({config.methods.title})"}
    else:
        titles = {"saliency": title_of(config.methods.saliency), "topup": config.methods.topup.title()}
    return Combination(replace(result, **titles), config, dataset)
