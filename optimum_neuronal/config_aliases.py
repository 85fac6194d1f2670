"""Other ways to give hyper-parameters: with the method's name, `NeuronALConfig(topup="owl:half_width=0.1")`, as on the
command line; and by old names, as if they were fields of the config, `NeuronALConfig(steps="block")`.

They are sorted into `saliency_args` and `topup_args` before the config is made, so that nothing else knows of them. Which
old names there are is told by `ALIASES` in `config_fields`.
"""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import wraps
from numbers import Real
from typing import Any, TypeVar

from .config_fields import ALIASES, ConfigFields
from .efforts import EFFORTS, default_topup
from .methods import make_method
from .registry import parse_method
from .system.notes import get_logger
from .topup import TOPUPS


logger = get_logger(__name__)

Config = TypeVar("Config", bound=type[ConfigFields])


def understands_aliases(cls: Config) -> Config:
    """Class decorator: the config takes aliases as keyword arguments, and reading one gives the value in force. Names of
    methods may come with hyper-parameters.

    They are no fields, so that `dataclasses.replace` and `asdict` know `topup_args` alone.
    """
    init = cls.__init__
    parameters = inspect.signature(init)

    @wraps(init)
    def __init__(self, *args, **values):
        given = {name: values.pop(name) for name in ALIASES if name in values}
        with_arguments = any(isinstance(value, str) and ":" in value for value in (*args, *values.values()))
        if given or with_arguments:
            call = parameters.bind(self, *args, **values)
            for kind in ("saliency", "topup"):
                _split_method(kind, call.arguments)
            if given:
                topup, topup_args = _topup_of(call.arguments), call.arguments.get("topup_args")
                call.arguments["topup_args"] = resolve_aliases(topup, topup_args, given)
            args, values = call.args[1:], call.kwargs
        init(self, *args, **values)

    cls.__init__ = __init__
    for name in ALIASES:
        setattr(cls, name, _reading(name))
    return cls


def _topup_of(arguments: Mapping[str, Any]) -> str:
    """Name of the top-up that the config will have. (A bad effort is told of when it is made.)"""
    effort = arguments.get("effort")
    usual = default_topup(effort if effort in tuple(EFFORTS) else "default", arguments.get("pattern"))
    return arguments.get("topup") or usual


def _split_method(kind: str, arguments: dict[str, Any]) -> None:
    """Moves hyper-parameters that come with a method's name to the others, in place.

    Raises:
        `ValueError`: one is given twice and differently, or the text is none of `NAME:KEY=VALUE,...`.
    """
    method, place = arguments.get(kind), f"{kind}_args"
    if not isinstance(method, str) or ":" not in method:
        return
    arguments[kind], own = parse_method(method)
    resolved = as_arguments(place, arguments.get(place))
    for name, value in as_json(own).items():
        _give(resolved, name, value, f"{kind}={method!r}", place)
    arguments[place] = resolved


def _give(resolved: dict[str, Any], name: str, value: Any, told: str, place: str) -> None:
    """Adds a hyper-parameter, in place. Raises `ValueError` if it is there already, with another value."""
    if resolved.setdefault(name, value) != value:
        raise ValueError(
            f"{name} is given twice and differently: {told}, but {place} holds {resolved[name]!r}. Leave one of them out."
        )


def _reading(name: str) -> property:
    owners = " or ".join(f"topup={topup!r}" for topup in ALIASES[name].topups)

    def value_in_force(config) -> Any:
        if config.topup not in ALIASES[name].topups:
            raise AttributeError(f"{name} is a hyper-parameter of {owners}, but the top-up is {config.topup!r}.")
        return getattr(config.make_methods().topup, name)

    def refuse(config, value) -> None:
        raise AttributeError(
            f"{name} is read from topup_args, and a config is not changed: make another one, such as "
            f"dataclasses.replace(config, topup_args={{{name!r}: {value!r}}})."
        )

    return property(value_in_force, refuse, doc=f"The value in force of a hyper-parameter of {owners}.")


def resolve_aliases(topup: str, topup_args: Mapping[str, Any] | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """`topup_args` with those aliases that belong to the top-up. The others are checked, and said to have no effect.

    Args:
        topup (`str`): name of the top-up.
        topup_args (`Mapping[str, Any]`, *optional*): its hyper-parameters.
        given (`Mapping[str, Any]`): alias -> value.

    Raises:
        `ValueError`: there is no such top-up, a value is given twice and differently, or a top-up refuses it.
    """
    TOPUPS.get(topup)
    resolved = as_arguments("topup_args", topup_args)
    for name, value in as_json(given).items():
        if topup not in ALIASES[name].topups:
            _warn_if_unused(name, value, topup)
        else:
            _give(resolved, name, value, f"{name}={value!r}", "topup_args")
    return resolved


def _warn_if_unused(name: str, value: Any, topup: str) -> None:
    """Nothing is said of a value that is the default: configs that earlier releases saved hold them all."""
    owners = ALIASES[name].topups
    defaults = [entry.default for owner in owners for entry in fields(TOPUPS.get(owner)) if entry.name == name]
    if value in as_json(defaults):
        return
    for owner in owners:
        make_method(TOPUPS, owner, "topup_args", {name: value})  # a bad value is an error all the same
    told = tuple(value) if isinstance(value, list) else value
    others = ", ".join(f"topup={owner!r}" for owner in owners)
    logger.warning(f"{name}={told!r} has no effect: the top-up {topup!r} does not use it, but {others} does.")


def merge_saved(values: Mapping[str, Any], overriding: Mapping[str, Any]) -> dict[str, Any]:
    """A saved config's dict with some values replaced, in which no alias contradicts `topup_args`.

    Args:
        values (`Mapping[str, Any]`):
            What `to_dict` returned, or did in an earlier release: then it holds every alias, if only as its default,
            and what `topup_args` holds beside it was what counted.
        overriding (`Mapping[str, Any]`): fields and aliases that replace those of the dict.
    """
    values, replaced = dict(values), ALIASES.keys() & overriding.keys()
    if "topup_args" in values:
        topup_args = as_arguments("topup_args", values["topup_args"])
        values["topup_args"] = {name: value for name, value in topup_args.items() if name not in replaced}
    merged = values | dict(overriding)
    saved_before = ALIASES.keys() <= values.keys()
    settled = ALIASES.keys() & as_arguments("topup_args", merged.get("topup_args")).keys() if saved_before else ()
    return {name: value for name, value in merged.items() if name not in settled}


def as_arguments(name: str, values: Mapping[str, Any] | None) -> dict[str, Any]:
    """Hyper-parameters as JSON has them.

    Args:
        name (`str`): of the field that holds them, for messages.
        values (`Mapping[str, Any]`, *optional*): hyper-parameter -> value. None: none are given.

    Raises:
        `TypeError`: no mapping of names, or a value that JSON has not.
    """
    if values is not None and not isinstance(values, Mapping):
        raise TypeError(f"{name} is {values!r}: expected a dict of hyper-parameters, or None.")
    arguments = as_json(values or {})
    for key, value in arguments.items():
        if not _is_json(value):
            raise TypeError(f"{name} holds {key}={value!r}: expected numbers, text, or lists of these.")
    return arguments


def as_json(value: Any) -> Any:
    """A value as it comes back from JSON: lists instead of arrays, tuples and iterators, at any depth; numbers of any
    kind as Python's own.

    So a config equals the one that is made of its saved dict, and an iterator is read once.
    """
    if isinstance(value, Mapping):
        return {key: as_json(part) for key, part in value.items()}
    if hasattr(value, "tolist"):  # arrays, tensors and their scalars
        return value.tolist()
    if isinstance(value, Real) and not isinstance(value, (int, float)):
        return float(value)
    if isinstance(value, (list, tuple, range, Iterator)):
        return [as_json(part) for part in value]
    return value


def _is_json(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_json(part) for key, part in value.items())
    if isinstance(value, list):
        return all(map(_is_json, value))
    return value is None or isinstance(value, (bool, int, float, str))
