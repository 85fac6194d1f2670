"""Checks of arguments and hyperparameters: a wrong type raises `TypeError`, a wrong value `ValueError`."""

import difflib
import math
from collections.abc import Iterable, Sequence
from dataclasses import Field, field
from importlib.util import find_spec
from numbers import Integral, Real
from typing import Any, get_args

import regex


def require_extra(package: str, extra: str) -> None:
    """Raise `ImportError` if a package that an extra of this package installs is missing."""
    if find_spec(package) is None:
        raise ImportError(f"{package} is missing: pip install 'optimum-neuronal[{extra}]'")


def did_you_mean(name: Any, known: Iterable[str]) -> str:
    """Return `" Did you mean 'wanda'?"` if a name is close to a known one, otherwise an empty string."""
    close = difflib.get_close_matches(str(name), list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def validate_list(name: str, value: Any, example: str) -> list:
    """Return the entries of a list, tuple, array or iterator, but not of a single text."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (str, bytes, dict, type)) or not isinstance(value, Iterable):
        raise TypeError(f"{name} is {_shown(value)}: expected a list, such as {example}.")
    return list(value)


def validate_strings(name: str, value: Any, example: str) -> list[str]:
    entries = validate_list(name, value, example)
    for entry in entries:
        if not isinstance(entry, str):
            raise TypeError(f"{name} holds {_shown(entry)}: expected text, such as {example}.")
    return entries


def check_patterns(name: str, value: Any) -> None:
    for index, pattern in enumerate(validate_strings(name, value, "['q_proj']")):
        try:
            regex.compile(pattern)
        except (regex.error, OverflowError, RecursionError) as error:
            raise ValueError(
                f"{name}[{index}] is not a valid regular expression: {_shown(pattern)}: {error}."
            ) from error


def check_count(name: str, value: Any, least: int) -> None:
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    _require(whole, whole and value >= least, name, value, f"a whole number of at least {least}")


def check_number(name: str, value: Any, least: float, most: float = math.inf, above: bool = False) -> None:
    """Check that a number is finite and from `least` to `most`. With `above`, `least` itself is not allowed."""
    real = isinstance(value, Real) and not isinstance(value, bool)
    inside = real and least <= value <= most and value != math.inf and not (above and value == least)
    if above:
        bounds = f"above {least:g}" + ("" if most == math.inf else f", at most {most:g}")
    else:
        bounds = f"of at least {least:g}" if most == math.inf else f"from {least:g} to {most:g}"
    _require(real, inside, name, value, f"a number {bounds}")


def check_numbers(name: str, values: Any, least: float, most: float) -> tuple[float, ...]:
    """Return one or more numbers from `least` to `most`."""
    numbers = validate_list(name, values, f"[{least}, {most}]")
    if not numbers:
        raise ValueError(f"{name} is empty: expected at least one number from {least:g} to {most:g}.")
    for number in numbers:
        check_number(name, number, least, most)
    return tuple(map(float, numbers))


def hyper(default: Any, least: float | None = None, most: float = math.inf, above: bool = False, choices=()) -> Any:
    """Return a dataclass field for a hyperparameter, with the bounds or choices that [`check_field`] checks."""
    return field(default=default, metadata={"least": least, "most": most, "above": above, "choices": choices})


def check_field(entry: Field, value: Any, kind: Any = None) -> Any:
    """Return the value of a dataclass field, checked by its bounds, see [`hyper`], and its type or another `kind`."""
    name, bounds, kind = entry.name, entry.metadata, kind or entry.type
    kinds = get_args(kind) or (kind,)
    if value is None and entry.default is None:
        return None
    if bounds.get("choices"):
        check_choice(name, value, bounds["choices"])
    elif bool in kinds:
        _require(isinstance(value, bool), True, name, value, "True or False")
    elif bounds.get("least") is None:
        return value
    elif kinds == (float, ...) or tuple[float, ...] in kinds:
        return check_numbers(name, value, bounds["least"], bounds["most"])
    elif kinds == (int, ...):
        value = tuple(validate_list(name, value, str(list(entry.default))))
        for number in value:
            check_count(name, number, bounds["least"])
    elif int in kinds:
        check_count(name, value, bounds["least"])
    else:
        check_number(name, value, bounds["least"], bounds.get("most", math.inf), bounds.get("above", False))
    return value


def check_sparsity(value: Any) -> None:
    real = isinstance(value, (int, float)) and not isinstance(value, bool)
    hint = f". Did you mean {value / 100:g}?" if real and 1 < value < 100 else ""
    _require(real, real and 0 <= value < 1, "sparsity", value, f"a share in [0, 1), such as 0.7{hint}")


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    expected = f"one of {', '.join(map(repr, choices))}"
    if value not in choices:
        expected += f".{did_you_mean(value, choices)}".rstrip(".")
    _require(isinstance(value, str), value in choices, name, value, expected)


def _require(right_type: bool, right_value: bool, name: str, value: Any, expected: str) -> None:
    """Raise `TypeError` or `ValueError` unless a value has the right type, and is one of those expected."""
    if not (right_type and right_value):
        stop = "" if expected.endswith("?") else "."
        raise (ValueError if right_type else TypeError)(f"{name} is {_shown(value)}: expected {expected}{stop}")


def _shown(value: Any) -> str:
    """Return a value for an error's message: itself if it is short, else its type."""
    shown = repr(value)
    return shown if len(shown) <= 60 and "\n" not in shown else f"a {type(value).__name__}"
