"""The combinations that a comparison prunes with, and their configs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from ..common.registry import parse_method
from ..common.validation import check_choice, check_numbers, validate_list, validate_strings
from ..config.config_fields import as_json
from ..config.neuronal_config import NeuronALConfig
from ..config.presets import PRESETS
from ..saliency import SALIENCIES
from ..topup import TOPUPS
from .results import PRESET, Result


Combinations = list[tuple[Result, NeuronALConfig | None]]


def find_combinations(
    saliencies: Iterable[str] = ("wanda",),
    topups: Iterable[str] = ("uniform", "owl", "neuronal"),
    sparsities: Iterable[float] = (0.6, 0.7, 0.8),
    presets: Iterable[str] = (),
    without: Iterable[str] = (),
    sweep: Mapping[str, Sequence[Any]] | None = None,
    dataset: Any = "c4",
    config: Mapping[str, Any] | None = None,
) -> Combinations:
    """Return each combination with its config; an impossible one has an error and None. See [`compare`]."""
    saliencies = validate_strings("saliencies", saliencies, "['wanda']")
    topups, presets = (
        validate_strings("topups", topups, "['search']"),
        validate_strings("presets", presets, "['paper']"),
    )
    sparsities = as_json(list(dict.fromkeys(validate_list("sparsities", sparsities, "[0.6]"))))
    for registry, methods in ((SALIENCIES, saliencies), (TOPUPS, topups)):
        for method in methods:
            registry.get(parse_method(method)[0])
    for preset in presets:
        check_choice("presets", preset, list(PRESETS))
    if sparsities:
        check_numbers("sparsities", sparsities, 0, 1)
    left_out = {
        _pair(*text.partition("+")[::2]) for text in validate_strings("without", without, "['sparsegpt+dsnot']")
    }
    sweep = {
        name: [value for index, value in enumerate(values) if value not in values[:index]]
        for name, values in as_json(sweep or {}).items()
    }
    fields = {**(config or {}), **sweep}
    for name, several in (("sparsity", "sparsities"), ("saliency", "saliencies"), ("topup", "topups")):
        if name in fields:
            raise ValueError(f"{name} is {fields[name]!r}: give a list as {several}.")
    if empty := [name for name, values in sweep.items() if not len(values)]:
        raise ValueError(f"sweep has no values of {empty[0]}: name some, or leave it out.")
    methods = [
        Result(sparsity, *pair)
        for sparsity, *pair in dict.fromkeys(product(sparsities, saliencies, topups))
        if _pair(*pair) not in left_out
    ]
    wanted = methods + _of_presets(dict.fromkeys(presets), sparsities)
    if not wanted:
        raise ValueError("There is nothing to compare: name methods and a sparsity, or a preset.")
    others = {**as_json(config or {}), "dataset": dataset if isinstance(dataset, str) else None}
    combinations: Combinations = []
    for values in product(*sweep.values()):
        setting = dict(zip(sweep, values))
        for result in wanted:
            result = replace(result, setting=setting)
            try:
                made = _make_config(result, others | setting)
                combinations.append((_titled(result, made), made))
            except ValueError as error:
                combinations.append((replace(result, error=" ".join(str(error).split())), None))
    if all(config is None for _, config in combinations):
        raise ValueError(f"No combination is possible: {combinations[0][0].error}")
    return list({(result.method, result.error): (result, config) for result, config in combinations}.values())


def _titled(result: Result, config: NeuronALConfig) -> Result:
    """Return a combination with the titles of its methods, which name variants and steps, in place of what was given."""
    if result.saliency == PRESET:
        return replace(result, topup=f"{result.topup} ({config.methods.title})")
    return replace(result, saliency=config.methods.saliency.title(), topup=config.methods.topup.title())


def _pair(saliency: str, topup: str) -> tuple[str, str]:
    """Return the registered names of two methods."""
    return SALIENCIES.get(parse_method(saliency)[0]).name, TOPUPS.get(parse_method(topup)[0]).name


def _of_presets(presets: Iterable[str], sparsities: Sequence[float]) -> list[Result]:
    """Return the combinations of presets: at their own sparsity if they have one, else at every sparsity."""
    return [
        Result(sparsity, PRESET, name)
        for name in presets
        for sparsity in ([PRESETS[name]["sparsity"]] if "sparsity" in PRESETS[name] else sparsities)
    ]


def _make_config(combination: Result, others: Mapping[str, Any]) -> NeuronALConfig:
    """Return the config of a combination with the other fields. Raise `ValueError` if the combination is impossible."""
    fields = {"sparsity": combination.sparsity, **others}
    if combination.saliency == PRESET:
        return NeuronALConfig.preset(combination.topup, **fields)
    for kind, text in (("saliency", combination.saliency), ("topup", combination.topup)):
        name, hyperparameters = parse_method(text)
        fields |= {kind: name, f"{kind}_args": fields.get(f"{kind}_args", {}) | hyperparameters}
    return NeuronALConfig(**fields)
